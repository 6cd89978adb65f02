"""Launches of the interpreter in a fork: their writes and errors come back, and a crash fails a single launch."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from kerneltune.adopt import startup
from kerneltune.adopt.folder import CLASSES
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.replay import make_replay
from kerneltune.processes.forked import Fork, ForkCrashedError, run_forked, shared_bytes
from kerneltune.processes.start import WorkerStoppedError, tell


@triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (32, 64)], key=["N"])
@triton.jit
def followed(table_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Copy N elements at the address in table (1,) to y (N,)."""
    places = tl.arange(0, BLOCK)
    x_ptr = tl.load(table_ptr).to(tl.pointer_type(tl.float32))
    tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N), mask=places < N)


def test_fork_writes_shared_bytes() -> None:
    values = shared_bytes(4)
    run_forked(lambda: values.fill_(7))
    assert values.tolist() == [7] * 4
    assert shared_bytes(0).tolist() == []


def test_run_forked_imports_modules_of_a_first_launch_before_the_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton.experimental.gluon", raising=False)
    run_forked(lambda: None)
    assert "triton.experimental.gluon" in sys.modules


def test_error_of_a_fork_is_raised_with_its_cause() -> None:
    def fail() -> None:
        raise ValueError("outside") from KeyError("inside")

    with pytest.raises(ValueError, match=r"^outside$") as raised:
        run_forked(fail)
    assert repr(raised.value.__cause__) == "KeyError('inside')"


def test_error_that_cannot_be_sent_is_raised_as_text() -> None:
    class OwnError(Exception):
        pass

    def fail() -> None:
        raise OwnError("of a program")

    with pytest.raises(RuntimeError, match=r"^OwnError: of a program$"):
        run_forked(fail)


def test_fork_that_crashes_is_an_error() -> None:
    with pytest.raises(ForkCrashedError, match=r"^crashed: SIGKILL$"):
        run_forked(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_fork_that_exits_is_an_error() -> None:
    with pytest.raises(ForkCrashedError, match=r"^test_forked.py:\d+: ended the process: SystemExit: 0$"):
        run_forked(lambda: sys.exit(0))


def test_fork_that_sigterm_ends_is_not_to_blame() -> None:
    def end() -> None:
        tell(os.getpid())
        signal.pause()

    fork = Fork(end)
    assert not fork.receive()
    os.kill(fork.last_note, signal.SIGTERM)
    with pytest.raises(WorkerStoppedError, match=r"^a process of the command was ended from outside: SIGTERM$"):
        fork.result()


def test_launch_that_crashes_in_a_fork_leaves_later_launches_right(tmp_path: Path) -> None:
    x, table = torch.arange(8.0), torch.zeros(1, dtype=torch.int64)
    startup.capture(tmp_path)
    followed[(1,)](table, torch.empty(0), 0)
    startup.uninstall()
    (launch,) = read_capture(tmp_path).classes
    replay = make_replay(launch, tmp_path / CLASSES / launch.digest, "cpu", 0)
    replay.named["N"] = 8
    with pytest.raises(ForkCrashedError, match=r"^crashed: SIGSEGV$"):
        replay.run(launch.candidates[0].config)
    replay.named["table_ptr"].fill_(x.data_ptr())
    replay.named["y_ptr"] = y = shared_bytes(32).view(torch.float32)
    second = make_replay(launch, tmp_path / CLASSES / launch.digest, "cpu", 0)
    second.named |= replay.named
    second.run(launch.candidates[0].config)
    assert y.tolist() == x.tolist()


def test_capture_of_a_table_of_addresses_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.arange(8.0), torch.empty(8)
    startup.capture(tmp_path)
    followed[(1,)](torch.tensor([x.data_ptr()]), y, 8)
    startup.uninstall()
    assert y.tolist() == x.tolist()
    assert "followed: not captured: table_ptr holds addresses, which mean nothing in another process" in caplog.text
    assert not (tmp_path / CLASSES).exists()
