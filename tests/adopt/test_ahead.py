"""Preparation before the first launch: each piece of work is done once, as Triton would do it."""

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from adopted import author_configs, captured, example, kernel_of, write_table
from triton.runtime.autotuner import Autotuner

from kerneltune.adopt import ahead, arguments, startup
from kerneltune.adopt.serving import Server

TYPES = ["*bf16", "fp32", "constexpr", ["i32", ["*fp32"]]]


class Steps(threading.Thread):
    """Counts the calls of a Server to the thread that prepares."""

    begun = waited = 0

    def start(self) -> None:
        self.begun += 1
        super().start()

    def join(self, timeout: float | None = None) -> None:
        self.waited += 1
        super().join(timeout)


class Nvidia(SimpleNamespace):
    """Triton 3.6's driver module: records what is built."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.built: list[Any] = []
        self.CudaLauncher = lambda source, metadata: self.built.append((source.signature, metadata.tensordesc_meta))


def served_folder(folder: Path, device: str = "") -> Path:
    """Capture the example and write a table for it."""
    capture = captured(folder, (4, 96), (4, 256))
    tables = [kernel_of(launches, author_configs(launches[0])) for launches in capture.by_kernel()]
    write_table(folder, *tables, device=device)
    return folder


def launched(folder: Path, steps: Steps, *columns: int) -> Server:
    """Serve the example's launches with a Server that has these steps."""
    server = Server(folder, preparing=steps)
    startup.replace_method(Autotuner, "run", server.make_run)
    for count in columns:
        example().step(4, count)
    return server


def test_preparation_of_a_table_begins_once_and_only_new_launches_await_it(tmp_path: Path) -> None:
    steps = Steps()
    server = launched(served_folder(tmp_path), steps, 96, 96, 256, 256, 96)
    assert (steps.begun, steps.waited) == (
        1,
        3,
    )  # two kernels at two sizes, which the choice of the second kernel does not tell apart
    assert server.hits == 3


def test_preparation_for_another_gpu_does_not_begin(tmp_path: Path) -> None:
    steps = Steps()
    server = launched(served_folder(tmp_path, device="nvidia_h100"), steps)
    assert server.table() is None
    assert steps.begun == 0


def test_served_launches_of_unchanged_kernels_parse_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = served_folder(tmp_path)
    parsed: list[Any] = []
    arguments.source_digest.cache_clear()
    monkeypatch.setattr(arguments, "code_digest", lambda function: parsed.append(function) or "")
    server = launched(folder, Steps(), 96, 256)
    arguments.source_digest.cache_clear()
    assert server.hits == 3
    assert parsed == []


def test_preparation_digests_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[None] = []
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace(triton_key=lambda: digested.append(None)))
    ahead.prepare(tmp_path, is_cache_new=False)
    assert len(digested) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_preparation_in_progress_does_not_block_a_forked_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace(triton_key=goes_on.wait))
    preparation = threading.Thread(target=ahead.prepare, args=(tmp_path, False), daemon=True)
    preparation.start()
    child = os.fork()
    if not child:  # its copy of the thread never goes on
        signal.alarm(60)
        preparation.join()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    goes_on.set()
    preparation.join()


def test_preparation_without_a_c_compiler_still_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_given: object) -> None:
        raise OSError("no C compiler")

    digested: list[None] = []
    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace(triton_key=lambda: digested.append(None)))
    nvidia = Nvidia(make_launcher=None)
    nvidia.CudaLauncher = refuse
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", nvidia)
    ahead.prepare(listed(tmp_path, [{"signature": TYPES, "descriptors": None}]), is_cache_new=True)
    assert len(digested) == 1


def test_preparation_that_fails_lets_the_launch_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[bool] = []

    def fail() -> None:
        failed.append(True)
        raise OSError("no such library")

    monkeypatch.setitem(sys.modules, "triton.runtime.cache", SimpleNamespace(triton_key=fail))
    ahead.prepare(tmp_path, is_cache_new=False)
    assert failed == [True]


def listed(root: Path, launchers: object) -> Path:
    """Write a folder's list of launchers."""
    path = root / ahead.LAUNCHERS
    path.parent.mkdir()
    path.write_text(json.dumps({"launchers": launchers}))
    return root


def test_build_launchers_builds_each_stored_signature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SimpleNamespace(signature={"x": "*bf16", "sizes": ("i32", "constexpr")})
    kernel = SimpleNamespace(src=source, metadata=SimpleNamespace(tensordesc_meta=[]))
    nvidia = Nvidia(make_launcher=None)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", nvidia)
    ahead.build_launchers(listed(tmp_path, [{"signature": TYPES, "descriptors": [None]}, ahead.launcher_of(kernel)]))
    assert ({0: "*bf16", 1: "fp32", 2: "constexpr", 3: ("i32", ("*fp32",))}, [None]) in nvidia.built
    assert ({0: "*bf16", 1: ("i32", "constexpr")}, []) in nvidia.built
    assert len(nvidia.built) == 2


def test_build_launchers_skips_signatures_with_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia = Nvidia(make_launcher=None, CudaUtils=lambda: pytest.fail("a second type of descriptors"))
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", nvidia)
    descriptors = [{"swizzle": 3, "elem_size": 2, "elem_type": 6, "block_size": [64, 64]}]
    ahead.build_launchers(listed(tmp_path, [{"signature": ["tensordesc<bf16[64, 64]>", "*bf16"], "descriptors": descriptors}]))
    assert nvidia.built == []


@pytest.mark.parametrize("stored", [3, {}, [{"signature": [7], "descriptors": None}]])
def test_build_launchers_of_a_damaged_list_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: object) -> None:
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", Nvidia(make_launcher=None))
    with pytest.raises(ValueError):
        ahead.build_launchers(listed(tmp_path, stored))


def test_build_launchers_without_a_list_or_make_launcher_builds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia = Nvidia(make_launcher=None)
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", nvidia)
    ahead.build_launchers(tmp_path)
    newer = Nvidia()
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", newer)
    ahead.build_launchers(listed(tmp_path, [{"signature": TYPES, "descriptors": None}]))
    assert nvidia.built == newer.built == []
