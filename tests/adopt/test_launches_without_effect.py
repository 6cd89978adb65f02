"""Capture: a class whose first launch changes nothing keeps the values of a later launch."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kerneltune.adopt import program, startup
from kerneltune.adopt.effects import learn
from kerneltune.adopt.folder import CLASSES, LaunchClass
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.replay import make_replay

SOURCE = """
import triton
import triton.language as tl
@triton.autotune(
    [triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64})], ["n"], do_bench=lambda call, quantiles: [call() or 1.0] * 3
)
@triton.jit
def scaled(x, lengths, n, factor, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < tl.load(lengths)
    tl.store(x + places, tl.load(x + places, mask=mask) * factor, mask=mask)
"""


@pytest.fixture
def scaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Return a function that launches the kernel, which all of these tests capture as a single class."""
    (tmp_path / "of_scales.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(importlib.import_module("sys").modules, "of_scales", raising=False)
    kernel = importlib.import_module("of_scales").scaled

    def launch(factor: float, length: int = 40, fill: float = 1.0) -> torch.Tensor:
        x = torch.full((40,), fill)
        kernel[lambda meta: (-(-40 // meta["BLOCK"]),)](x, torch.tensor([length]), 40, factor)
        return x

    return launch


def captured(folder: Path, launches: Callable[[], object], **options: Any) -> LaunchClass:
    startup.capture(folder, **options)
    launches()
    startup.recorder().flush()
    startup.uninstall()
    (launch,) = read_capture(folder).classes
    return launch


def factor_of(launch: LaunchClass) -> Any:
    """Return the captured factor."""
    return next(argument.value for argument in launch.arguments if argument.name == "factor")


@pytest.mark.parametrize("autotune", [False, True])
@pytest.mark.parametrize(("before", "after"), [((1.0, 40), (0.5, 40)), ((0.5, 0), (0.25, 40))], ids=["factor", "length"])
def test_class_whose_first_launches_change_nothing_keeps_the_next_that_does(
    tmp_path: Path,
    scaled: Any,
    before: tuple[float, int],
    after: tuple[float, int],
    autotune: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "is_interpreted", lambda: not autotune)
    launch = captured(
        tmp_path, lambda: [scaled(*before), scaled(*before), scaled(*after), scaled(4.0), scaled(8.0)], autotune=autotune
    )
    assert factor_of(launch) == after[0]
    assert (launch.choice is not None) is autotune
    assert read_capture(tmp_path).count(launch).launches == 5
    monkeypatch.undo()
    replay = make_replay(launch, tmp_path / CLASSES / launch.digest, "cpu", 0)
    assert learn(replay, launch.first_config) == ["x"]
    assert replay.expected["x"].tolist() == [after[0]] * 40


def test_class_whose_first_launch_has_an_effect_keeps_it(tmp_path: Path, scaled: Any) -> None:
    assert factor_of(captured(tmp_path, lambda: [scaled(0.5), scaled(1.0), scaled(2.0)])) == 0.5


def test_class_of_launches_without_effect_keeps_a_launch_and_looks_at_few(
    tmp_path: Path, scaled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = list[int]()
    original = startup.sys.modules["kerneltune.adopt.recorder"].describe_launch
    monkeypatch.setattr("kerneltune.adopt.recorder.describe_launch", lambda *args: described.append(1) or original(*args))
    launch = captured(tmp_path, lambda: [scaled(1.0) for _ in range(100)])
    assert (factor_of(launch), len(described)) == (1.0, 17)


def test_class_whose_launch_after_a_failed_launch_has_an_effect_keeps_it(
    tmp_path: Path, scaled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launches() -> None:
        kernel = importlib.import_module("of_scales").scaled
        with monkeypatch.context() as failing:
            failing.setattr(kernel, "fn", SimpleNamespace(**{name: getattr(kernel.fn, name) for name in ("fn", "arg_names")}))
            with pytest.raises(AttributeError):
                scaled(3.0)
        scaled(0.5)

    assert factor_of(captured(tmp_path, launches)) == 0.5


def test_capture_waits_for_no_gpu_to_see_an_effect(tmp_path: Path, scaled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may wait for a kernel that the program launches later."""
    is_done = [False]
    monkeypatch.setattr("kerneltune.adopt.values.Effect.is_known", lambda _self, wait=False: wait or is_done[0])

    def launches() -> None:
        scaled(1.0)
        scaled(0.5)
        is_done[0] = True
        scaled(0.25)

    assert factor_of(captured(tmp_path, launches)) == 0.25
