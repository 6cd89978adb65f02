"""Written arguments: no write that a config omits or adds passes, whatever values were captured."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kerneltune.adopt import startup
from kerneltune.adopt.effects import learn, wrong_results
from kerneltune.adopt.folder import CLASSES
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.replay import ReplayError, make_replay

CONFIGS = [triton.Config({"BLOCK": block}) for block in (32, 64)]


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.jit
def zeroed(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Write zeros to y (N,), but nothing with blocks of 64."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < N)
    tl.store(y_ptr + places, x - x, mask=(places < N) & (BLOCK < 64))


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.jit
def cluttered(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Copy x (N,) to y (N,), and write to x as well with blocks of 64."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + places, mask=places < N)
    tl.store(y_ptr + places, x, mask=places < N)
    tl.store(x_ptr + places, x + 1, mask=(places < N) & (BLOCK == 64))


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.jit
def idle(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Read x (N,) and write nothing."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.load(x_ptr + places, mask=places < N)


@triton.autotune(configs=CONFIGS, key=["N"])
@triton.jit
def copied(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Copy x (N,) to y (N,)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + places, tl.load(x_ptr + places, mask=places < N), mask=places < N)


def lines(folder: Path, kernel: Any, grid: int | None = None, y: torch.Tensor | None = None) -> list[list[str]]:
    """Capture a launch of a kernel on x = 1, 2, … and y = 0; returns what disagrees under each of the author's configs."""
    y = torch.zeros(128) if y is None else y
    startup.capture(folder)
    kernel[lambda meta: (triton.cdiv(128, meta["BLOCK"]) if grid is None else grid,)](torch.arange(1.0, 129.0), y, 128)
    startup.uninstall()
    captured = read_capture(folder).classes[0]
    launch = make_replay(captured, folder / CLASSES / captured.digest, "cpu", 0)
    configs = [one.config for one in captured.candidates]
    learn(launch, configs[0])
    lines_by_config = []
    for config in configs:
        launch.restore()
        launch.run(config)
        lines_by_config.append(wrong_results(launch, {}))
    return lines_by_config


def test_argument_that_held_its_result_already_counts_as_written(tmp_path: Path) -> None:
    assert lines(tmp_path, zeroed) == [[], ["y_ptr: 128 of 128 elements never written, first at (0,)"]]


def test_argument_that_held_a_copy_already_counts_as_written(tmp_path: Path) -> None:
    assert lines(tmp_path, copied, y=torch.arange(1.0, 129.0)) == [[], []]
    launch = read_capture(tmp_path).classes[0]
    replay = make_replay(launch, tmp_path / CLASSES / launch.digest, "cpu", 0)
    assert learn(replay, launch.candidates[0].config) == ["y_ptr"]


def test_write_that_the_first_config_does_not_make_is_a_disagreement(tmp_path: Path) -> None:
    assert lines(tmp_path, cluttered) == [[], ["x_ptr: is written, which the author's first config does not do"]]


def test_launch_that_writes_nothing_raises(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"\.idle: the author's first config changes no argument: nothing to compare"):
        lines(tmp_path, idle)


def test_launch_with_an_empty_grid_agrees(tmp_path: Path) -> None:
    assert lines(tmp_path, idle, grid=0) == [[], []]


def referred(monkeypatch: pytest.MonkeyPatch, kernel: Any, reference: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Give a kernel a reference, as kerneltune.autotune does."""
    monkeypatch.setattr(kernel, "kerneltune_reference", reference, raising=False)
    return kernel


def test_reference_of_an_argument_that_is_never_written_disagrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = referred(monkeypatch, idle, lambda arguments: {"y_ptr": 2 * arguments["x_ptr"]})
    assert lines(tmp_path, kernel) == [["y_ptr: 128 of 128 elements never written, first at (0,)"]] * 2


def test_reference_may_change_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = referred(monkeypatch, copied, lambda args: {"y_ptr": args["x_ptr"].mul_(2)})
    assert [one[0].partition(":")[0] for one in lines(tmp_path, kernel)] == ["y_ptr", "y_ptr"]


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        (lambda args: None, "gives a NoneType: expected a dict of argument -> tensor"),
        (lambda args: args["x_ptr"], "gives a Tensor: expected a dict of argument -> tensor"),
        (lambda args: {"y_ptr": args["x_ptr"], "y": 1}, "'y': expected a tensor argument of the kernel: x_ptr, y_ptr"),
        (lambda args: {"y_ptr": args["x_ptr"][:5]}, r"y_ptr: \(5,\) torch.float32: expected \(128,\) torch.float32"),
        (lambda args: {"y_ptr": args["x_ptr"][None]}, r"y_ptr: \(1, 128\) torch.float32: expected \(128,\) torch.float32"),
        (lambda args: {"y_ptr": args["x_ptr"] * 1j}, r"y_ptr: \(128,\) torch.complex64: expected \(128,\) torch.float32"),
        (lambda args: {"y_ptr": 3.0}, r"y_ptr: float: expected a tensor, \(128,\) torch.float32"),
        (lambda args: {}, "no value for y_ptr, which the kernel writes"),
        (lambda args: args["z_ptr"], "KeyError: 'z_ptr'"),
    ],
)  # fmt: skip
def test_reference_with_results_of_another_form_raises_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Callable[[Mapping[str, Any]], Any], text: str
) -> None:
    with pytest.raises(ReplayError, match=rf"^test_effects\.py:\d+: reference of .*\.copied: {text}$"):
        lines(tmp_path, referred(monkeypatch, copied, reference))
