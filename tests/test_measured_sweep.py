"""A sweep with a simulated GPU: launches that crash a process, interrupted runs, first tables."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_jobs
import numpy as np
import pytest
import torch
from bench_jobs import FakeCheck, FakeCompare
from small_sweeps import RMSNORM, STREAM

from kerneltune import device, ops, records, sweep_run
from kerneltune.checking import check
from kerneltune.measuring import compare
from kerneltune.measuring.compare import CEILING, make_record
from kerneltune.plan import Options, Plan, Selection, load_plan
from kerneltune.processes.start import WorkerStoppedError
from kerneltune.processes.worker import WorkerCrashedError
from kerneltune.progress import Progress
from kerneltune.records import Record
from kerneltune.spec import Case, Config
from kerneltune.stale import plans_of
from kerneltune.sweep_run import measure_batches, measure_live, run_sweep
from kerneltune.task import Outcome, Run, Task
from kerneltune.tune.gpu_worker import GpuBench, GpuWorker, compare_in_worker

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")

OPS = ops.load()
CASE = Case("a", (("M", 8), ("N", 64)), "bfloat16", "none", (("zero_centered", False),))
OP = OPS["rmsnorm_bwd"]
BASELINE, OPTIMIZED = OP.variant("baseline"), OP.variant("optimized")
RUNS = [Run(task, task.default) for task in (Task(OP, CASE, BASELINE), Task(OP, CASE, OPTIMIZED))]


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = device.Device("NVIDIA H200", "sm_90", 132, 60_000_000, "580")
    monkeypatch.setattr(device, "current", lambda: h200)
    for module in (check, compare):
        monkeypatch.setattr(module, "why_too_large", lambda *_: None)
    monkeypatch.setattr(sweep_run, "compile_ahead", lambda *_: None)


@pytest.mark.usefixtures("an_h200")
def test_free_memory_is_asked_while_the_worker_holds_no_other_case(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, asked = list[Case](), set[Case]()

    def why_too_large(_op: object, case: Case) -> None:
        assert {*held} <= {case}
        asked.add(case)

    (tmp_path / "tiny.yaml").write_text(STREAM)
    monkeypatch.setattr(GpuWorker, "check", lambda _worker, task, _config: held.append(task.case) or Outcome("checked"))
    monkeypatch.setattr(GpuWorker, "close", lambda _worker: held.clear())
    monkeypatch.setattr(check, "why_too_large", why_too_large)
    plan = load_plan(OPS, Selection(str(tmp_path / "tiny.yaml")), replace(options, extent="check"))
    assert {row.status for row in run_sweep(plan, Progress()).records} == {"checked"}
    assert len(asked) > 1


@pytest.mark.usefixtures("an_h200")
def test_check_that_crashes_its_process_fails_only_its_row(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.yaml").write_text(STREAM)
    monkeypatch.setattr(sweep_run, "GpuWorker", partial(GpuWorker, FakeCheck))
    rows = run_sweep(load_plan(OPS, Selection(str(tmp_path / "tiny.yaml")), replace(options, extent="check")), Progress()).records
    assert {(row.case, row.config["block"]) for row in rows if row.config} >= {("odd", 1024), ("even", 1024)}
    assert {row.config["block"] for row in rows if row.config} >= {512, 1024, 4096}
    for row in rows:
        assert row.config is not None
        fate = {
            512: ("failed", "crashed: the GPU worker died: exit code -6"),
            4096: ("failed", "dst: 1 of 2 words wrong"),
        }.get(row.config["block"], ("checked", ""))
        assert (row.status, row.reason) == fate, row.config


def measured_row(task: Task, reason: str = "x") -> Record:
    return make_record("", Run(task, task.default), Outcome("skipped", reason))


@pytest.mark.usefixtures("an_h200")
@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("abort", "crashed: the GPU worker died: exit code -6"),
        ("hang", "crashed: took longer than 5 s"),
        ("fault", "crashed: RuntimeError: CUDA error: an illegal memory access was encountered"),
    ],
)
def test_launch_that_crashes_the_gpu_worker_fails_only_its_row(
    does: str, reason: str, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process measures the other variants, and it stays for the cases that follow."""
    monkeypatch.setenv(bench_jobs.DOES, does)
    workers: list[GpuWorker] = []

    def started(**_: object) -> GpuWorker:
        workers.append(GpuWorker(FakeCompare))
        workers[0].variant_timeout_s = 5.0 if does == "hang" else 600.0
        return workers[0]

    monkeypatch.setattr(sweep_run, "GpuWorker", started)
    (tmp_path / "norm.yaml").write_text(RMSNORM + "  - {name: other, M: 32, N: 64}\n")
    selection = Selection(str(tmp_path / "norm.yaml"), ("rmsnorm_bwd",), variants=("baseline", "pr593", "optimized"))
    rows = measure_live(load_plan(OPS, selection, options), Progress(), "test")
    outcomes = {(r.case, r.variant): (r.status, r.reason) for r in rows}
    assert outcomes["big", "pr593"] == ("failed", reason)
    assert {key: outcome for key, outcome in outcomes.items() if outcome[0] == "failed"} == {("big", "pr593"): ("failed", reason)}
    assert len(outcomes) == 6
    assert workers[0].started == 2


@pytest.mark.usefixtures("an_h200")
def test_gpu_worker_that_is_sent_sigterm_leaves_the_rows_before_and_none_that_failed(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(bench_jobs.DOES, "stop")
    monkeypatch.setattr(sweep_run, "GpuWorker", lambda **_: GpuWorker(FakeCompare))
    (tmp_path / "norm.yaml").write_text(RMSNORM + "  - {name: other, M: 32, N: 64}\n")
    selection = Selection(str(tmp_path / "norm.yaml"), ("rmsnorm_bwd",), variants=("baseline", "pr593", "optimized"))
    plan = load_plan(OPS, selection, options)
    big, other = plan.cases()
    with pytest.raises(WorkerStoppedError, match=r"^the GPU worker was ended from outside: exit code -15$"):
        measure_batches([(plan, [other, big])], Progress())
    written = records.load(options.records_folder / "norm.jsonl")
    assert {(record.case, record.status) for record in written} == {("other", "passed")}
    assert len(written) == 3


@pytest.mark.usefixtures("an_h200")
@pytest.mark.parametrize(("launched", "statuses"), [("", ["failed"] * 2), (CEILING, ["passed"] * 2)])
def test_crash_of_inputs_or_ceiling_fails_only_the_case_or_the_ceiling_column(
    launched: str, statuses: list[str], options: Options, tmp_path: Path
) -> None:
    class Crashes(GpuBench):
        def __init__(self) -> None:
            self.asked: list[bool] = []

        def compare(self, runs: Any, ceiling: Any, untimed: Any) -> Any:
            self.asked.append(ceiling is not None)
            if ceiling is not None:
                raise WorkerCrashedError("took longer than 300 s", launched)
            return {task.variant.name: np.linspace(9.9, 10.1, 15) for task, _ in runs}, {}

    stream = OPS["stream"]
    beside = Task(stream, Case("c", (("read", 64), ("write", 64)), "int32"), stream.variants[0])
    bench = Crashes()
    records_of = compare_in_worker(bench, "f", RUNS, Run(beside, beside.default))
    assert [(record.status, record.ceiling_gbps) for record in records_of] == [(status, None) for status in statuses]
    assert bench.asked == ([True, False] if launched else [True])


@pytest.mark.usefixtures("an_h200")
def test_measure_live_measures_each_variant_as_often_as_asked(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(_bench: object, _family: str, runs: Any, _ceiling: object) -> list[Record]:
        return [measured_row(task) for task, _ in runs]

    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM)
    monkeypatch.setattr(sweep_run, "compare_in_worker", compared)
    selection = Selection(str(path), ("rmsnorm_bwd",))
    for named, repeat in ((("pr593",), 2), (("pr593", "pr593"), 1), (("baseline", "optimized"), 1)):
        plan = load_plan(OPS, replace(selection, variants=named), options)
        records_of = measure_live(plan, Progress(), "test", repeat=repeat)
        assert [(record.case, record.variant) for record in records_of] == [
            ("big", name) for name in dict.fromkeys(named)
        ] * repeat


@pytest.mark.usefixtures("an_h200")
def test_stale_case_that_a_variant_cannot_run_with_any_config_fails_in_its_row(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other variants and cases are measured; a ceiling that no config can run leaves the column of ceilings empty."""

    def refused(case: Case, _config: Config) -> str | None:
        return "N must not be 64" if dict(case.axes).get("N", 64) == 64 else None

    op = replace(OP, variants=(BASELINE, replace(OPTIMIZED, invalid=refused)))
    stream = replace(OPS["stream"], variants=(replace(OPS["stream"].variants[0], invalid=refused),))
    monkeypatch.setattr(sweep_run, "GpuWorker", lambda **_: GpuWorker(FakeCompare))
    monkeypatch.setattr(GpuWorker, "compare", lambda _worker, *request: FakeCompare.compare(SimpleNamespace(), *request))
    (tmp_path / "norm.yaml").write_text(RMSNORM.replace("rmsnorm_fwd, ", "") + "  - {name: other, M: 32, N: 128}\n")
    (plan,) = plans_of({op.name: op, "stream": stream}, Selection(str(tmp_path / "norm.yaml")), options)
    rows = measure_batches([(plan, plan.cases())], Progress())
    reason = "rmsnorm_bwd: M=64 N=64 float32 none zero_centered=False: expected sizes that some config can run: N must not be 64"
    assert {(row.case, row.variant): (row.status, row.reason) for row in rows} == {
        ("big", "optimized"): ("failed", reason), ("big", "baseline"): ("passed", ""),
        ("other", "optimized"): ("passed", ""), ("other", "baseline"): ("passed", ""),
    }  # fmt: skip
    assert {row.ceiling_gbps for row in rows} == {None}
    assert len(records.load(options.records_folder / "norm.jsonl")) == len(rows)


@pytest.mark.usefixtures("an_h200")
def test_quick_sweep_shows_a_first_table_before_peers_that_compile(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep neither checks nor searches; the second time it measures all variants together, which replace the kept rows."""
    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM + "  - {name: other, M: 32, N: 64}\nheadline: {op: rmsnorm_bwd}\n")
    happened: list[tuple[str, ...]] = []

    def compared(_bench: object, _family: str, runs: Any, _ceiling: object) -> list[Record]:
        first = runs[0][0]
        happened.append((first.op.name, first.case.name, *(task.variant.name for task, _ in runs)))
        return [measured_row(task, f"{len(happened)}") for task, _ in runs]

    monkeypatch.setattr(sweep_run, "compare_in_worker", compared)
    shown: list[int] = []
    quick = replace(options, quick=True)
    swept = run_sweep(
        load_plan(OPS, Selection(str(path)), quick), Progress(), lambda rows: shown.append(len(rows) + len(happened))
    )
    own = ("baseline", "pr593", "optimized")
    assert [step[:5] for step in happened] == 2 * [("rmsnorm_bwd", name, *own) for name in ("big", "other")]
    fast, whole = ({*step[2:]} for step in (happened[0], happened[2]))
    assert whole - fast >= {"compile", "max-autotune"}
    assert "eager" in fast
    assert shown == [2 * len(fast) + 2]
    assert {row.reason for row in swept.records} == {"3", "4"}
    assert {row.reason for row in records.load(swept.files[0])} == {"3", "4"}


@pytest.mark.usefixtures("an_h200")
def test_sweep_shows_a_first_table_before_checks_unless_an_interrupted_run_goes_on(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM)
    happened: list[str] = []
    interrupts = [KeyboardInterrupt]

    def compared(_bench: object, _family: str, runs: Any, _ceiling: object) -> list[Record]:
        happened.append("whole" if "compile" in {task.variant.name for task, _ in runs} else "fast")
        if happened[-1] == "whole" and interrupts:
            raise interrupts.pop()
        return [measured_row(task) for task, _ in runs]

    def checked(runs: Any, _check: object) -> list[Outcome]:
        if happened[-1:] != ["check"]:
            happened.append("check")
        return [Outcome("checked") for _ in runs]

    monkeypatch.setattr(sweep_run, "compare_in_worker", compared)
    monkeypatch.setattr(sweep_run, "check_runs", checked)
    selection, untuned = Selection(str(path), ("rmsnorm_bwd",)), replace(options, extent="measure")
    with pytest.raises(KeyboardInterrupt):
        run_sweep(load_plan(OPS, selection, untuned), Progress(), lambda rows: happened.append(f"table of {len(rows)}"))
    assert happened[:2] == ["fast", f"table of {len([v for v in OP.variants if not v.compiles and not v.missing()])}"]
    assert happened[2:] == ["check", "whole"]
    assert options.results is not None
    journal = options.results / "runs" / "nvidia_h200" / "norm.journal.jsonl"
    records.append(journal, [measured_row(RUNS[0].task)])
    happened.clear()
    run_sweep(load_plan(OPS, selection, untuned), Progress(), lambda _: happened.append("table"))
    assert happened == ["whole"]


@pytest.mark.usefixtures("an_h200")
def test_sweep_interrupted_after_a_failed_check_keeps_no_time_of_the_first_table(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_plan: Plan, _progress: object) -> None:
        raise KeyboardInterrupt

    def checked(runs: Any, _check: object) -> list[Outcome]:
        return [Outcome("failed", "dx: wrong") if task.variant.name == "pr593" else Outcome("checked") for task, _ in runs]

    def compared(_bench: object, _family: str, runs: Any, _ceiling: object) -> list[Record]:
        return [measured_row(task) for task, _ in runs]

    monkeypatch.setattr(sweep_run, "compare_in_worker", compared)
    monkeypatch.setattr(sweep_run, "check_runs", checked)
    monkeypatch.setattr("kerneltune.tune.run.run_tune", interrupted)
    (tmp_path / "norm.yaml").write_text(RMSNORM)
    plan = load_plan(OPS, Selection(str(tmp_path / "norm.yaml"), ("rmsnorm_bwd",)), options)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(plan, Progress(), lambda _: None)
    rows = {row.variant: row.status for row in records.load(options.records_folder / "norm.jsonl")}
    assert [name for name, status in rows.items() if status == "failed"] == ["pr593"]


@pytest.mark.usefixtures("an_h200")
def test_sweep_compiles_many_kernels_in_parallel_before_measuring(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    monkeypatch.setattr(sweep_run, "compare_in_worker", lambda *_: events.append(("measured", "")) or [])
    monkeypatch.setattr(sweep_run, "compile_ahead", lambda runs, *_: events.extend((t.op.name, t.variant.name) for t, _ in runs))
    path = tmp_path / "norm.yaml"
    cases = 'bench:\n  - {name: "n{N}", M: 64, N: [256, 512, 1024], quant: none}\n'
    path.write_text(f"family: norm\nops: [rmsnorm_fwd]\ndefaults: {{dtype: bfloat16, zero_centered: false}}\n{cases}")

    measure_live(load_plan(OPS, Selection(str(path)), options), Progress(), "test")
    own = [v.name for v in OPS["rmsnorm_fwd"].variants if not v.is_peer]
    ahead = [*[("rmsnorm_fwd", name) for name in own] * 3, *[("stream", OPS["stream"].variants[0].name)] * 3]
    assert (sorted(events[:-3]), events[-3:]) == (sorted(ahead), [("measured", "")] * 3)

    events.clear()
    measure_live(load_plan(OPS, Selection(str(path), cases=("n256",)), options), Progress(), "test")
    assert events == [("measured", "")], "few kernels are compiled where they are launched"


@pytest.mark.usefixtures("an_h200")
def test_sweep_after_an_interrupted_measurement_repeats_no_check(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, checked = tmp_path / "tiny.yaml", list[str]()
    path.write_text(STREAM)

    def checks(runs: Any, _check: object) -> list[Outcome]:
        checked.append(runs[0].task.case.name)
        return [Outcome("checked") for _ in runs]

    def interrupted(*_: object) -> list[Record]:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep_run, "check_runs", checks)
    monkeypatch.setattr(sweep_run, "compare_in_worker", interrupted)
    plan = load_plan(OPS, Selection(str(path)), replace(options, extent="measure"))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(plan, Progress())
    monkeypatch.setattr(sweep_run, "compare_in_worker", lambda *_: [])
    assert checked == ["odd", "even"]
    run_sweep(plan, Progress())
    assert checked == ["odd", "even"]
    run_sweep(plan, Progress())
    assert checked == ["odd", "even"] * 2


@pytest.mark.usefixtures("an_h200")
def test_sweep_after_an_interrupted_measurement_continues_behind_measured_cases(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(STREAM + "  - {name: bigger, read: 2097152, write: 2097152}\n")
    measured: list[str] = []

    def comparing(_bench: object, _family: str, runs: Any, _ceiling: object) -> list[Record]:
        case = runs[0].task.case
        if case.name == "bigger" and "bigger" not in measured:
            measured.append("bigger")
            raise KeyboardInterrupt
        measured.append(case.name)
        return [make_record("", runs[0], Outcome("skipped", "x"))]

    monkeypatch.setattr(sweep_run, "compare_in_worker", comparing)
    untuned = replace(options, extent="measure")
    selection = Selection(str(path), cases=("big*",))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(load_plan(OPS, selection, untuned), Progress())
    assert options.results is not None
    journal = options.results / "runs" / "nvidia_h200" / "tiny.journal.jsonl"
    table = options.results / "nvidia_h200" / "tiny.csv"
    assert [record.case for record in records.load(table.with_suffix(".jsonl"))] == ["big"]
    assert ",big," in table.read_text()
    with journal.open("ab") as file:
        file.write(b'{"op": "stre')  # what was being written
    stages: list[tuple[str, int, int]] = []
    steps: list[str] = []

    class Spoken(Progress):
        def stage(self, name: str, total: int, kept: int = 0, work: int = 0) -> None:
            stages.append((name, total, kept))

        def advance(self, text: str, work: int = 1) -> None:
            steps.append(text)

    swept = run_sweep(load_plan(OPS, selection, untuned), Spoken())
    assert stages[-1] == ("measure", 2, 1)
    assert steps[-1:] == ["stream bigger int32 none"]
    assert sum("big" in s for s in steps) == 1
    assert measured == ["big", "bigger", "bigger"]
    assert [record.case for record in swept.records] == ["big", "bigger"]
    assert swept.files == [options.results / "nvidia_h200" / name for name in ("tiny.jsonl", "tiny.md", "tiny.csv")]
    assert records.load(swept.files[0]) == swept.records
    assert not journal.exists()


@pytest.mark.usefixtures("an_h200")
def test_measured_case_asks_an_unsupported_variant_for_no_config(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def default(_case: Case) -> Any:
        raise ZeroDivisionError

    def compared(_bench: object, _family: str, runs: Any, _ceiling: object) -> list[Record]:
        configs.update({run.task.variant.name: run.config for run in runs})
        return []

    configs: dict[str, Any] = {}
    monkeypatch.setattr(sweep_run, "compare_in_worker", compared)
    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM)
    op = replace(OP, variants=(BASELINE, replace(OPTIMIZED, default=default, unsupported=lambda _case: "needs more rows")))
    measure_live(load_plan({**OPS, OP.name: op}, Selection(str(path), (OP.name,)), options), Progress(), "test")
    assert set(configs) == {"baseline", "optimized"}
    assert configs["optimized"] is None


@pytest.mark.usefixtures("an_h200")
def test_variant_whose_default_config_fails_its_check_is_neither_tuned_nor_timed(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows fail, so that a gate on the records fails; a variant of which another config alone fails is timed."""
    tuned, timed = set[str](), set[str]()

    def checked(runs: Any, _check: object) -> list[Outcome]:
        failing = {"pr593": lambda _is_default: True, "optimized": lambda is_default: not is_default}
        wrong = [failing.get(task.variant.name, lambda _: False)(config == task.default) for task, config in runs]
        return [Outcome("failed", "dx: 1 of 2 wrong") if is_wrong else Outcome("checked") for is_wrong in wrong]

    def compared(_bench: object, _family: str, runs: Any, _ceiling: object) -> list[Record]:
        timed.update(task.variant.name for task, _ in runs)
        return [measured_row(task) for task, _ in runs]

    def tune(plan: Plan, _progress: object) -> None:
        tuned.update(task.variant.name for entry in plan.cases() for task in plan.tasks(entry.op, entry.case))

    monkeypatch.setattr(sweep_run, "check_runs", checked)
    monkeypatch.setattr(sweep_run, "compare_in_worker", compared)
    monkeypatch.setattr("kerneltune.tune.run.run_tune", tune)
    (tmp_path / "norm.yaml").write_text(RMSNORM)
    own = ("baseline", "pr593", "optimized")
    plan = load_plan(OPS, Selection(str(tmp_path / "norm.yaml"), ("rmsnorm_bwd",), variants=own), options)
    run_sweep(plan, Progress())
    assert (tuned, timed) == ({"baseline", "optimized"}, {"baseline", "optimized"})
    written = records.load(options.records_folder / "norm.jsonl")
    failed = {(row.variant, row.reason) for row in written if row.status == "failed"}
    assert failed == {("pr593", "failed its check in case small: dx: 1 of 2 wrong")}
    assert {row.variant for row in written} == {*own}
