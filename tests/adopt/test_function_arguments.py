"""Kernels that are given a function under `triton.jit`, such as an activation: captured, replayed and served by function."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch
import triton
from adopted import imported, kernel_of, run_python, write_table
from test_capture_tuning import GPU
from test_plain_kernels import PlainBench
from warm_python import python

from kerneltune.adopt import program, startup, tuning
from kerneltune.adopt.arguments import Argument, encode_value, signature
from kerneltune.adopt.folder import CLASSES, LaunchClass
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.replay import ReplayError, make_replay
from kerneltune.adopt.tuning import tune_capture
from kerneltune.progress import Progress

SOURCE = """
import triton
import triton.language as tl
@triton.jit
def relu(x):
    return tl.maximum(x, 0.0)
@triton.jit
def doubled(x):
    return x * 2
def made():
    @triton.jit
    def inner(x):
        return x
    return inner
"""
KERNEL = """
@triton.jit
def {}(x_ptr, y_ptr, N, ACT: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, ACT(tl.load(x_ptr + places, mask=places < N)), mask=places < N)
"""
TUNED = '@triton.autotune([triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], key=["N", "ACT"])'
SOURCE += KERNEL.format("applied") + TUNED + KERNEL.format("tuned")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a module with a kernel that is given a function."""
    yield from imported(tmp_path, monkeypatch, "of_functions", SOURCE)


def test_signature_of_a_function_imports_no_module_and_that_of_any_float_is_its_type() -> None:
    def of(value: Any) -> str:
        return signature([Argument("ACT", "value", value)])

    functions = [of({"function": ["no_such_module", name, "0" * 16]}) for name in ("act", "relu")]
    assert len({*functions, of(0.5), of(1)}) == 4
    assert of(encode_value(float("inf"))) == of(encode_value(float("nan"))) == of(0.5)


def launch(kernel: Any, act: Any, **options: Any) -> list[float]:
    """Launch a kernel on -2 to 2 with a function; returns the result."""
    x, y = torch.arange(-2.0, 3.0), torch.empty(5)
    kernel[(1,)](x, y, 5, act, **options)
    return y.tolist()


def captured(folder: Path, kernel: Any, *functions: Any, **options: Any) -> list[LaunchClass]:
    """Capture a launch with each function, sorted by the function's name."""
    startup.capture(folder, plain=True)
    for function in functions:
        launch(kernel, function, **options)
    startup.recorder().flush()
    startup.uninstall()
    return sorted(read_capture(folder).classes, key=lambda one: one.label)


@pytest.mark.parametrize(("name", "options"), [("applied", {"BLOCK": 32}), ("tuned", {})])
def test_capture_has_a_class_per_function_argument_and_replays_it(
    tmp_path: Path, module: Any, name: str, options: dict[str, int]
) -> None:
    classes = captured(tmp_path, getattr(module, name), module.relu, module.doubled, module.relu, **options)
    assert [one.label.split()[2:] for one in classes] == [
        ["float32", "N=5", f"ACT={function}", *(["BLOCK=32"] if options else [])] for function in ("doubled", "relu")
    ]
    assert not any(one.problem for one in classes)
    for one, expected in zip(classes, ([-4.0, -2.0, 0.0, 2.0, 4.0], [0.0, 0.0, 0.0, 1.0, 2.0]), strict=True):
        replay = make_replay(one, tmp_path / CLASSES / one.digest, "cpu", 0)
        replay.run(next(each.config for each in one.candidates if each.grid is not None))
        assert replay.named["y_ptr"].tolist() == expected


def test_replay_with_a_changed_function_raises_with_its_name(tmp_path: Path, module: Any) -> None:
    (launch_class,) = captured(tmp_path / "cap", module.applied, module.relu, BLOCK=32)
    module.relu = module.doubled
    with pytest.raises(ReplayError, match=r"applied 5 .*ACT: of_functions\.relu: its source has changed since it was captured"):
        make_replay(launch_class, tmp_path / "cap" / CLASSES / launch_class.digest, "cpu", 0)
    del module.relu
    with pytest.raises(ReplayError, match=r"ACT: of_functions\.relu: the module holds no function of this name"):
        make_replay(launch_class, tmp_path / "cap" / CLASSES / launch_class.digest, "cpu", 0)


def test_capture_of_a_function_that_no_module_holds_is_refused(
    tmp_path: Path, module: Any, caplog: pytest.LogCaptureFixture
) -> None:
    startup.capture(tmp_path, plain=True)
    assert launch(module.applied, module.made(), BLOCK=32) == [-2.0, -1.0, 0.0, 1.0, 2.0]
    startup.uninstall()
    assert not (tmp_path / CLASSES).exists()
    assert "argument ACT: a function that of_functions does not hold by its name, made.<locals>.inner" in caplog.text


def test_plain_kernel_is_served_by_function(tmp_path: Path, module: Any) -> None:
    classes = captured(tmp_path, module.applied, module.relu, module.doubled, BLOCK=32)
    chosen = next(one.config for one in classes[1].candidates if one.config.num_warps == 8)
    write_table(tmp_path, kernel_of(classes[1:], [chosen], is_plain=True, shared=()))
    startup.install(tmp_path, misses=None)
    assert launch(module.applied, module.relu, BLOCK=32) == [0.0, 0.0, 0.0, 1.0, 2.0]
    assert launch(module.applied, module.doubled, BLOCK=32) == [-4.0, -2.0, 0.0, 2.0, 4.0]
    assert launch(module.applied, module.relu, BLOCK=32) == [0.0, 0.0, 0.0, 1.0, 2.0]
    assert startup.server().counters.by_name() == {"served of_functions.applied": 2, "missed of_functions.applied": 1}


def test_autotuned_kernel_with_the_function_in_its_key_is_served_by_function(tmp_path: Path, module: Any) -> None:
    classes = captured(tmp_path, module.tuned, module.relu, module.doubled)
    second = classes[1].candidates[1].config
    write_table(tmp_path, kernel_of(classes[1:], [second], shared=()))
    startup.install(tmp_path, misses=None, miss="nearest")
    for function in (module.doubled, module.relu, module.doubled):
        launch(module.tuned, function)
    assert startup.server().counters.by_name() == {"served of_functions.tuned": 1, "missed of_functions.tuned": 2}


def test_serving_a_config_with_a_changed_function_counts_the_launch_as_not_tuned(tmp_path: Path, module: Any) -> None:
    kernel = triton.autotune([triton.Config({"ACT": module.relu, "BLOCK": block}) for block in (32, 64)], key=["N"])(
        module.applied
    )
    startup.capture(tmp_path)
    x, y = torch.arange(-2.0, 3.0), torch.empty(5)
    kernel[(1,)](x, y, 5)
    startup.uninstall()
    (captured_class,) = read_capture(tmp_path).classes
    (first, *_) = [one.config for one in captured_class.candidates]
    changed = replace(first, kwargs={**first.kwargs, "ACT": {"function": ["of_functions", "relu", "0" * 16]}})
    write_table(tmp_path, kernel_of([captured_class], [changed]))
    startup.install(tmp_path, misses=None, miss="default")
    kernel[(1,)](x, y, 5)
    assert y.tolist() == [0.0, 0.0, 0.0, 1.0, 2.0]
    assert startup.server().counters.by_name() == {"served of_functions.applied": 0, "missed of_functions.applied": 1}


def test_tune_of_a_kernel_with_functions_tunes_every_class(tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu.stands_in(monkeypatch):
        monkeypatch.setattr("kerneltune.tune.session.GpuWorker", PlainBench)
        monkeypatch.setattr(tuning, "GpuWorker", PlainBench)
        monkeypatch.setattr(program, "device_slug", lambda: GPU)
        captured(tmp_path, module.applied, module.relu, module.doubled, BLOCK=32)
        outcome = tune_capture(tmp_path, Progress())
    assert outcome.skipped == []
    assert len(outcome.tuned) == 2


PROGRAM = """
import torch, triton
import triton.language as tl
from of_functions import applied
@triton.jit
def tripled(x):
    return x * 3
y = torch.empty(5)
applied[(1,)](torch.arange(5.0), y, 5, tripled, BLOCK=32)
print(y.tolist())
"""
REPLAYED = """
import sys
from pathlib import Path
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.replay import make_replay
(launch,) = read_capture(Path(sys.argv[1])).classes
replay = make_replay(launch, Path(sys.argv[1]) / "classes" / launch.digest, "cpu", 0)
replay.run(launch.candidates[0].config)
print(replay.named["y_ptr"].tolist())
"""


def test_replay_of_a_library_kernel_finds_a_function_of_the_programs_file(tmp_path: Path, module: Any) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = run_python("from kerneltune.cli import main; main()", *CAPTURE.format(tmp_path, python()).split())
    assert (ran.returncode, ran.stdout.splitlines()[:1]) == (0, ["[0.0, 3.0, 6.0, 9.0, 12.0]"]), ran.stderr
    replayed = run_python(REPLAYED, str(tmp_path / "cap"))
    assert replayed.stdout == "[0.0, 3.0, 6.0, 9.0, 12.0]\n", replayed.stderr


CAPTURE = "capture --plain --out {0}/cap -- {1} {0}/program.py"
