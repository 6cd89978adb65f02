"""Check the order of the arguments with which a compiled kernel is launched again."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from kerneltune.kernel_lib.relaunch import relaunch


class Kernel:
    """Stands for a function under `triton.jit`."""

    arg_names = ("x_ptr", "rows", "total", "COLS", "FLAG")


class Compiled:
    """Stands for the result of a launch; records launches."""

    packed_metadata = b""
    src = SimpleNamespace(signature=dict.fromkeys(Kernel.arg_names, "*fp32"))

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.launched.append((grid, *arguments))


def test_relaunch_passes_remaining_arguments_in_the_order_of_the_kernel() -> None:
    compiled = Compiled()
    launch = relaunch(Kernel, compiled, 7, 2, {"FLAG": True, "total": 5, "num_warps": 4, "COLS": 64})
    assert launch is not None
    launch(1024, 3)
    assert compiled.launched == [((7, 1, 1), 1024, 3, 5, 64, True)]


def test_relaunch_without_a_compiled_kernel_is_none() -> None:
    assert relaunch(Kernel, None, 1, 2, {}) is None


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0+git1"])
def test_relaunch_under_an_unknown_triton_version_is_none(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    assert relaunch(Kernel, Compiled(), 7, 2, {"FLAG": True, "total": 5, "COLS": 64}) is None


def test_relaunch_of_a_kernel_whose_launcher_takes_other_arguments_is_none() -> None:
    compiled = Compiled()
    compiled.src = SimpleNamespace(signature={"x_ptr": "*fp32"})
    assert relaunch(Kernel, compiled, 7, 2, {"FLAG": True, "total": 5, "COLS": 64}) is None
