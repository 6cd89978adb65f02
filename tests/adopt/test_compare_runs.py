"""Test what programs of examples/adopted_packages share: it names parts that fail and compares the results of two runs."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adopted import ROOT


@pytest.fixture
def compare_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the examples' module."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "adopted_packages"))
    yield importlib.import_module("compare_runs")
    del sys.modules["compare_runs"]


def test_run_parts_reports_a_failed_part_with_its_size_and_runs_the_others(compare_runs: Any) -> None:
    drawn: dict[int, float] = {}

    def draw(size: int) -> None:
        if size == 2:
            raise ValueError("no kernel of this size")
        drawn[size] = float(torch.rand(()))

    assert compare_runs.run_parts({draw: (1, 2, 3)}) == {"draw 2": "ValueError: no kernel of this size"}
    first = dict(drawn)
    compare_runs.run_parts({draw: (3, 1)})
    assert drawn == first


def test_differences_are_relative_to_results_of_the_other_run(compare_runs: Any, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first.pt"), str(tmp_path / "second.pt")
    assert compare_runs.differences({"y": torch.full((4,), 2.0), "gone": torch.ones(1)}, first, "") == {}
    assert compare_runs.differences({"y": torch.full((4,), 3.0)}, second, first) == {"y": 0.5}
    assert compare_runs.differences({"y": torch.full((4,), 3.0)}, "", second) == {"y": 0.0}
