"""Fixtures of the command line's tests: a width, record files, a GPU that is there or not, an engine that only listens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import both

from kerneltune import cache, device, records
from kerneltune.cli import console
from kerneltune.plan import Plan
from kerneltune.records import Record
from kerneltune.sweep_run import SweepResult
from kerneltune.tune.session import TuningResult


@pytest.fixture(autouse=True)
def hundred_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(console.console, "width", 100)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a record file and return its path."""

    def write(name: str, *rows: Record) -> Path:
        records.append(tmp_path / name, rows)
        return tmp_path / name

    return write


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: device.NO_GPU)
    monkeypatch.setattr(device, "model", lambda: device.INTERPRETER)


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", "sm_90", 132, 60_000_000, "570"))
    monkeypatch.setattr(device, "model", lambda: "NVIDIA H200")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Keep plan and folder of configs of sweep and tune for the engine, which answers with a measured and a failed row."""
    seen: dict[str, Any] = {"answer": both()}

    def fake(plan: Plan, reporter: Any, _first: object = None) -> list[Record]:
        seen.update(selection=plan.selection, options=plan.options, configs=cache.default_root())
        reporter.stage("check", 1)
        reporter.advance("one")
        reporter.note("a remark")
        return list(seen["answer"])

    def swept(*arguments: Any) -> SweepResult:
        return SweepResult(fake(*arguments), [])

    def tuned(*arguments: Any) -> list[TuningResult]:
        return [TuningResult("tuned", row) for row in fake(*arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr("kerneltune.sweep_run.run_sweep", swept)
    monkeypatch.setattr("kerneltune.tune.run.run_tune", tuned)
    return seen
