"""Check what is prepared before the first launch: how often each piece of work is done, and that it is what Triton would do."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from adopted import author_configs, captured, example, kernel_of, write_table
from triton.runtime.autotuner import Autotuner

from kerneltune.adopt import ahead, kernels, startup
from kerneltune.adopt.serving import Server

TYPES = ["*bf16", "fp32", "constexpr", ["i32", ["*fp32"]]]


class Steps(ahead.Preparation):
    """Counts what a Server asks of a Preparation."""

    def __init__(self) -> None:
        super().__init__(Path(), Path(), is_cache_new=False)
        self.begun, self.waited = 0, 0

    def begin(self) -> None:
        self.begun += 1

    def wait(self) -> None:
        self.waited += 1


class Nvidia(SimpleNamespace):
    """Triton 3.6's driver module: records what is built."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.built: list[Any] = []
        self.CudaUtils = lambda: self.built.append("utils")
        self.CudaLauncher = lambda source, metadata: self.built.append((source.signature, metadata.tensordesc_meta))


def served_folder(folder: Path, device: str = "") -> Path:
    """Capture the example and write a table for it."""
    capture = captured(folder, (4, 96), (4, 256))
    tables = [kernel_of(launches, author_configs(launches[0])) for launches in capture.kernels().values()]
    write_table(folder, *tables, device=device)
    return folder


def launched(folder: Path, steps: Steps, *columns: int) -> Server:
    """Serve the example's launches with a Server that has these steps."""
    server = Server(folder, triton.Config, preparing=steps)
    startup.replace_method(Autotuner, "run", server.make_run)
    for count in columns:
        example().step(4, count)
    return server


def test_preparation_of_a_served_table_begins_once_and_is_waited_for_by_new_launches_only(tmp_path: Path) -> None:
    steps = Steps()
    server = launched(served_folder(tmp_path), steps, 96, 96, 256, 256, 96)
    assert (steps.begun, steps.waited) == (
        1,
        3,
    )  # two kernels at two sizes, which the choice of the second kernel does not tell apart
    assert server.counts.hits == 3


def test_preparation_for_another_gpu_does_not_begin(tmp_path: Path) -> None:
    steps = Steps()
    server = launched(served_folder(tmp_path, device="nvidia_h100"), steps)
    assert server.table() is None
    assert steps.begun == 0


def test_served_launches_of_unchanged_kernels_parse_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = served_folder(tmp_path)
    parsed: list[Any] = []
    kernels.source_digest.cache_clear()
    monkeypatch.setattr(kernels, "code_digest", lambda function: parsed.append(function) or "")
    server = launched(folder, Steps(), 96, 256)
    kernels.source_digest.cache_clear()
    assert server.counts.hits == 3
    assert parsed == []


def test_preparation_digests_triton_once_whatever_asks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[None] = []
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace(triton_key=lambda: digested.append(None)))
    preparation = ahead.Preparation(tmp_path, tmp_path, is_cache_new=False)
    preparation.wait()  # nothing was begun
    assert digested == []
    for _ in range(3):
        preparation.begin()
        preparation.wait()
    assert len(digested) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_preparation_is_no_trap_for_a_process_that_is_forked_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace(triton_key=goes_on.wait))
    preparation = ahead.Preparation(tmp_path, tmp_path, is_cache_new=False)
    preparation.begin()
    child = os.fork()
    if not child:  # its copy of the thread never goes on
        signal.alarm(5)
        preparation.wait()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    goes_on.set()
    preparation.wait()


def test_preparation_without_a_child_process_still_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_more: Any) -> None:
        raise OSError("no more processes")

    digested: list[None] = []
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace(triton_key=lambda: digested.append(None)))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", Nvidia(make_launcher=None))
    preparation = ahead.Preparation(listed(tmp_path, 9), tmp_path, is_cache_new=True)
    preparation.begin()
    preparation.wait()
    assert len(digested) == 1


def test_preparation_that_fails_leaves_the_launch_to_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[bool] = []

    def fail() -> None:
        failed.append(True)
        raise OSError("no such library")

    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace(triton_key=fail))
    preparation = ahead.Preparation(tmp_path, tmp_path, is_cache_new=False)
    preparation.begin()
    preparation.wait()
    assert failed == [True]


def test_launchers_are_built_at_once_with_the_types_that_were_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia = Nvidia(make_launcher=None)
    stored = [{"signature": TYPES, "descriptors": [None]}, {"signature": [], "descriptors": None}]
    path = ahead.launchers_path(tmp_path)
    path.parent.mkdir()
    path.write_text(json.dumps({"launchers": stored}))
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", nvidia)
    ahead.main(tmp_path)
    assert nvidia.built.count("utils") == 1
    assert ({0: "*bf16", 1: "fp32", 2: "constexpr", 3: ("i32", ("*fp32",))}, [None]) in nvidia.built
    assert len(nvidia.built) == 3


@pytest.mark.parametrize("stored", ["{", "[]", '{"launchers": 3}', '{"launchers": [{"signature": [7], "descriptors": null}]}'])
def test_launchers_of_a_damaged_list_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str) -> None:
    path = ahead.launchers_path(tmp_path)
    path.parent.mkdir()
    path.write_text(stored)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", Nvidia(make_launcher=None))
    with pytest.raises(ValueError):
        ahead.main(tmp_path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collect processes instead of starting them, under Triton 3.6."""
    found: list[Any] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: found.append((command, more)))
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", Nvidia(make_launcher=None))
    return found


def listed(root: Path, count: int) -> Path:
    """Write a folder's list of launchers."""
    path = ahead.launchers_path(root)
    path.parent.mkdir()
    path.write_text(json.dumps({"launchers": [{"signature": TYPES, "descriptors": None}] * count}))
    return root


def test_launchers_are_built_by_a_process_that_is_not_served_itself(
    tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(startup.ADOPT, str(tmp_path))
    ahead.build_launchers(listed(tmp_path, 5), tmp_path / "cache")
    ((command, more),) = started
    assert command[-1] == str(tmp_path)
    assert startup.ADOPT not in more["env"]
    assert more["env"]["TRITON_CACHE_DIR"] == str(tmp_path / "cache")


def test_launchers_that_take_less_time_than_a_process_are_left_to_the_launch(tmp_path: Path, started: list[Any]) -> None:
    assert ahead.build_launchers(tmp_path, tmp_path) is None  # the folder has no list
    assert ahead.build_launchers(listed(tmp_path, 4), tmp_path) is None
    assert started == []


def test_launchers_are_not_built_where_triton_has_one_for_all_kernels(
    tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", Nvidia())
    assert ahead.build_launchers(listed(tmp_path, 9), tmp_path) is None
    assert started == []


def test_launcher_of_a_compiled_kernel_is_what_triton_makes_its_host_code_from() -> None:
    source = SimpleNamespace(signature={"x": "*bf16", "sizes": ("i32", "constexpr")})
    kernel = SimpleNamespace(src=source, metadata=SimpleNamespace(tensordesc_meta=[]))
    stored = json.loads(json.dumps(ahead.launcher_of(kernel)))
    nvidia = Nvidia(make_launcher=None)
    ahead.build([stored], nvidia)
    assert (dict(enumerate(source.signature.values())), []) in nvidia.built
