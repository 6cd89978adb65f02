"""Test a gate run on a pretended GPU: measured rows, number of processes, and the rows of the baseline that count."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from literal_records import changed
from simulated_records import one_process, rounds_us

from kerneltune import device, ops, sweep_run
from kerneltune.gating import run as gate_run
from kerneltune.gating.rows import pool
from kerneltune.gating.run import run_gate
from kerneltune.plan import Options, Selection, load_plan
from kerneltune.progress import Progress
from kerneltune.records import Record

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")

NORM = """
family: norm
ops: [rmsnorm_fwd]
defaults: {dtype: bfloat16, zero_centered: false, quant: none}
check:
  - {name: small, M: 3, N: 40}
bench:
  - {name: a, M: 64, N: 64}
  - {name: b, M: 64, N: 128}
gate: {margin: 0.03}
"""
OPTIONS = Options(peers=False)


class Lab:
    """Stands in for the GPU: times by variant and case; every call of `compare` is a case measured in a process."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.us: dict[str, float] = {"a": 50.0, "b": 80.0}
        self.measured: list[str] = []
        self.processes = 0
        self.odd = 1.0
        self.floors = [0.002]

    def compare(self, _bench: object, family: str, runs: Any, _ceiling: object) -> list[Record]:
        op, case, policy = runs[0][0].op, runs[0][0].case, runs[0][0].policy
        self.measured.append(case.name)
        us = self.us[case.name] * (self.odd if self.processes == 1 and case.name == "b" else 1.0)
        return [
            one_process(
                rounds_us(self.rng, us), 0, op=op.name, variant=task.variant.name, case=case.name, axes=dict(case.axes),
                options=dict(case.options), policy=policy, family=family,
                aa_floor=self.floors[self.processes % len(self.floors)],
            )
            for task, _config in runs
        ]  # fmt: skip

    def in_fresh_processes(self, count: int, work: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
        for _ in range(count):
            self.processes += 1
            yield work(*arguments)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    lab = Lab()
    monkeypatch.setattr(sweep_run, "compare_in_worker", lab.compare)
    monkeypatch.setattr(gate_run, "in_fresh_processes", lab.in_fresh_processes)
    monkeypatch.setattr(device, "current", lambda: device.Device("NVIDIA H200", "sm_90", 132, 60_000_000, "580"))
    return lab


@pytest.fixture
def selection(tmp_path: Path) -> Selection:
    path = tmp_path / "norm.yaml"
    path.write_text(NORM)
    return Selection(str(path), variants=("optimized",))


@pytest.fixture
def baseline(lab: Lab, selection: Selection) -> list[Record]:
    rows = pool(gate_run.run_processes(ops.load, load_plan(ops.load(), selection, OPTIONS), 3, Progress()))
    lab.measured.clear()
    lab.processes = 0
    return rows


def run(selection: Selection, baseline: list[Record], options: Options = OPTIONS, margin: float | None = None) -> Any:
    return run_gate(ops.load, load_plan(ops.load(), selection, options), baseline, 3, margin, Progress())


def test_run_without_a_change_passes_after_one_measurement(lab: Lab, selection: Selection, baseline: list[Record]) -> None:
    verdict, measured = run(selection, baseline)
    assert (verdict.exit_code, verdict.compared, lab.measured) == (0, 2, ["a", "b"] * 3)
    assert [len(row.samples_us or ()) for row in measured] == [3, 3]


def test_run_measures_only_a_slow_case_again_and_fails(lab: Lab, selection: Selection, baseline: list[Record]) -> None:
    lab.us["b"] *= 1.08
    verdict, measured = run(selection, baseline)
    assert (verdict.exit_code, verdict.reason) == (1, "1 regression")
    assert lab.measured == ["a", "b"] * 3 + ["b"] * 3
    assert verdict.rows[1].reason.endswith("3 and 6 processes")
    assert [len(row.samples_us or ()) for row in measured] == [3, 6]


def test_run_with_an_odd_process_passes_after_a_second_measurement(
    lab: Lab, selection: Selection, baseline: list[Record]
) -> None:
    lab.odd = 1.04
    verdict, _measured = run(selection, baseline)
    assert verdict.exit_code == 0
    assert lab.measured == ["a", "b"] * 3 + ["b"] * 3


def test_run_with_one_noisy_process_still_fails_a_slow_case(lab: Lab, selection: Selection, baseline: list[Record]) -> None:
    lab.us["b"] *= 1.08
    lab.floors = [0.002, 0.3, 0.003]
    verdict, measured = run(selection, baseline)
    assert (verdict.exit_code, verdict.reason) == (1, "1 regression")
    assert [row.aa_floor for row in measured] == [0.003, 0.003]
    lab.floors = [0.3, 0.3, 0.003]
    assert run(selection, baseline)[0].exit_code == 3


def test_run_without_a_margin_uses_that_of_the_sweep_file(lab: Lab, selection: Selection, baseline: list[Record]) -> None:
    lab.us["b"] *= 1.08
    assert run(selection, baseline, margin=0.15)[0].exit_code == 0
    path = Path(selection.family)
    path.write_text(NORM.replace("0.03", "0.15"))
    assert run(selection, baseline)[0].exit_code == 0


def test_run_of_a_selection_misses_only_rows_of_the_selection(lab: Lab, selection: Selection, baseline: list[Record]) -> None:
    gone = changed(baseline[0], variant="older")
    peer, elsewhere = changed(baseline[0], variant="eager"), changed(baseline[0], family="other")
    hot = changed(baseline[0], policy="hot")
    every = replace(selection, variants=())
    kept = [*baseline, peer, elsewhere, hot]
    assert run(every, kept)[0].exit_code == 0
    assert run(replace(every, cases=("a*",)), kept)[0].compared == 1
    missing, _measured = run(every, [*kept, gone])
    assert (missing.exit_code, missing.reason) == (1, "1 missing")
    assert run(selection, [*kept, gone])[0].exit_code == 0
    assert run(every, [*kept], replace(OPTIONS, peers=True))[0].compared == 3


def test_run_with_nothing_to_compare_measures_nothing(lab: Lab, selection: Selection, baseline: list[Record]) -> None:
    for rows, reason in (
        ([], "nothing compared: no timed record of the baseline is among what --run selects"),
        ([changed(baseline[0], op="other_op", family="other")], "nothing compared: no timed record of the baseline is among "),
        ([changed(baseline[0], device="NVIDIA H100")], "not comparable: baseline has device NVIDIA H100, this is NVIDIA H200"),
    ):
        verdict, measured = run(selection, rows)
        assert (verdict.exit_code, measured, lab.measured) == (2, [], [])
        assert verdict.reason.startswith(reason)


def test_run_against_a_baseline_of_two_gpus_leaves_out_the_other_with_a_note(
    lab: Lab, selection: Selection, baseline: list[Record]
) -> None:
    elsewhere = [changed(row, device="NVIDIA H100") for row in baseline]
    verdict, measured = run(selection, [*elsewhere, *baseline])
    assert (verdict.exit_code, verdict.compared, len(measured)) == (0, 2, 2)
    assert verdict.notes == ("rows that only baseline has, left out: 2 of NVIDIA H100 cold",)
    lab.us["b"] *= 1.08
    assert run(selection, [*elsewhere, *baseline])[0].reason == "1 regression"


def test_run_of_a_case_that_fails_its_check_fails(
    lab: Lab, selection: Selection, baseline: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    untimed = dict.fromkeys(["time_us", "gbps", "ci_low_us", "ci_high_us", "n", "aa_floor", "samples_us"])

    def wrong(*arguments: Any) -> list[Record]:
        return [changed(row, status="failed", reason="y differs", **untimed) for row in lab.compare(*arguments)]

    monkeypatch.setattr(sweep_run, "compare_in_worker", wrong)
    verdict, _measured = run(selection, baseline)
    assert (verdict.exit_code, verdict.reason) == (1, "2 failed")
