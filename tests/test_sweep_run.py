"""A sweep without a GPU: checked rows, written files, refused arguments."""

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from asserting import every
from literal_records import changed, to_json
from small_sweeps import RMSNORM, STREAM
from warm_python import python

from kerneltune import cache, cpu_checks, ops, records
from kerneltune.checking import jobs, memory
from kerneltune.checking.check import Checker
from kerneltune.device import INTERPRETER
from kerneltune.journals import Journal
from kerneltune.measuring.compare import make_record
from kerneltune.plan import Options, Selection, load_plan
from kerneltune.progress import Progress
from kerneltune.records import Record
from kerneltune.spec import Case, Outputs, Variant
from kerneltune.sweep_run import measure_live, run_sweep
from kerneltune.task import Outcome, Run
from kerneltune.tune.run import run_tune

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")

OPS = ops.load()


class Spoken(Progress):
    """Keeps stages, steps and notes."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.kept: list[int] = []
        self.steps: list[str] = []

    def stage(self, name: str, total: int, kept: int = 0, work: int = 0) -> None:
        self.stages.append((name, total))
        self.kept.append(kept)

    def advance(self, text: str, work: int = 1) -> None:
        self.steps.append(text)


@pytest.fixture
def stream_sweep(tmp_path: Path) -> Selection:
    path = tmp_path / "tiny.yaml"
    path.write_text(STREAM)
    return Selection(str(path))


def run(selection: Selection, options: Options) -> list[Record]:
    return run_sweep(load_plan(OPS, selection, options), Progress()).records


def written(options: Options) -> list[Path]:
    assert options.results is not None
    files = [path for path in options.results.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return sorted(path.relative_to(options.results) for path in files)


def test_sweep_without_a_gpu_only_checks(stream_sweep: Selection, options: Options) -> None:
    progress = Spoken()
    rows = run_sweep(load_plan(OPS, stream_sweep, options), progress).records
    assert [(r.op, r.variant, r.case, r.status) for r in rows] == [
        ("stream", "baseline", "odd", "checked"),
        ("stream", "baseline", "even", "checked"),
    ]
    for record in rows:
        assert record.device == INTERPRETER
        assert record.family == "tiny"
        assert record.source_hash == OPS["stream"].variant(record.variant).source_hash
        assert record.config == {"block": 1024, "warps": 8, "ctas": 0}
        assert record.reason == ""
        assert [record.time_us, record.gbps, record.ci_low_us, record.ci_high_us, record.n] == [None] * 5
    assert progress.stages == [("check", 2), ("check further configs and sizes", 2)]
    assert sorted(progress.steps) == [
        "stream baseline big, addresses", "stream baseline, configs on cases", "stream even int32 none", "stream odd int32 none",
    ]  # fmt: skip


def test_sweep_writes_check_records_into_ignored_runs_only(stream_sweep: Selection, options: Options) -> None:
    swept = run_sweep(load_plan(OPS, stream_sweep, options), Progress())
    assert written(options) == [Path("runs/interpreter/tiny.check.jsonl")]
    path = options.results / "runs" / "interpreter" / "tiny.check.jsonl"  # type: ignore[operator]
    assert swept.files == [path]
    assert records.load(path) == swept.records
    assert options.records_folder == options.results / "runs" / "interpreter"  # type: ignore[operator]
    assert not cache.default_root().exists()


def test_check_file_keeps_every_config_of_the_last_check_of_a_case(
    stream_sweep: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = {512: "x differs", 4096: "y differs"}

    def checked(plan: Any, _progress: Progress, entries: Any) -> tuple[list[Record], list[str], list[Record]]:
        (task,) = plan.tasks(entries[0].op, entries[0].case)
        rows = []
        for block in (512, 1024, 4096):
            reason = failing.get(block, "")
            run = Run(task, replace(task.default, block=block))
            rows.append(make_record("tiny", run, Outcome("failed" if reason else "checked", reason)))
        passes_elsewhere = make_record("tiny", run, Outcome("checked"))
        return [*rows, passes_elsewhere], [], []

    def kept() -> dict[Any, str]:
        rows = records.load(swept.files[0])
        return {row.config["block"]: row.reason for row in rows if row.config is not None}

    monkeypatch.setattr(cpu_checks, "check_on_cpu", checked)
    swept = run_sweep(load_plan(OPS, stream_sweep, options), Progress())
    assert kept() == {512: "x differs", 1024: "", 4096: "y differs"}
    del failing[512], failing[4096]
    run_sweep(load_plan(OPS, stream_sweep, options), Progress())
    assert kept() == {512: "", 1024: "", 4096: ""}


@pytest.mark.parametrize("name", ["tiny.check.jsonl", "tiny.jsonl"])
def test_sweep_beside_a_broken_file_of_records_raises_before_it_checks(
    stream_sweep: Selection, options: Options, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = options.results / "runs" / "interpreter" / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    monkeypatch.setattr(cpu_checks, "check_on_cpu", lambda *_: pytest.fail("checked"))
    with pytest.raises(ValueError, match=rf"{name}:1: JSON: truncated"):
        run(stream_sweep, options)


def test_quick_sweep_keeps_failed_further_configs_of_the_cases_that_it_checks(stream_sweep: Selection, options: Options) -> None:
    path = run_sweep(load_plan(OPS, stream_sweep, options), Progress()).files[0]
    odd, even = records.load(path)
    further = changed(odd, config={**(odd.config or {}), "block": 512}, status="failed", reason="x differs")
    path.write_text("".join(to_json(record) + "\n" for record in (changed(odd, status="failed", reason="y"), further, even)))
    quick = run(stream_sweep, replace(options, quick=True))
    assert [record.status for record in quick] == ["checked", "checked"]
    assert records.load(path) == [further, *quick]
    run(stream_sweep, options)
    assert [record.status for record in records.load(path)] == ["checked", "checked"]


def test_sweep_without_a_folder_uses_kerneltune_results(
    stream_sweep: Selection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELTUNE_RESULTS", str(tmp_path / "elsewhere"))
    run(stream_sweep, Options())
    assert (tmp_path / "elsewhere" / "runs" / "interpreter" / "tiny.check.jsonl").is_file()


def test_sweep_run_again_replaces_its_rows_and_keeps_the_others(stream_sweep: Selection, options: Options) -> None:
    path = options.results / "runs" / "interpreter" / "tiny.check.jsonl"  # type: ignore[operator]
    run(stream_sweep, options)
    old = [changed(record, date="2020-01-01T00:00:00+00:00") for record in records.load(path)]
    path.write_text("".join(to_json(record) + "\n" for record in old))
    again = run(replace(stream_sweep, cases=("od*",)), options)
    assert [record.case for record in again] == ["odd"]
    after = records.load(path)
    assert after == [old[1], again[0]]
    assert after[1].date != old[0].date


def test_sweep_drops_rows_of_cases_that_the_sweep_file_lacks(stream_sweep: Selection, options: Options) -> None:
    path = options.results / "runs" / "interpreter" / "tiny.check.jsonl"  # type: ignore[operator]
    run(stream_sweep, options)
    first, second = records.load(path)
    deleted = changed(second, status="failed", reason="y differs", axes={name: 2 * size for name, size in second.axes.items()})
    path.write_text("".join(to_json(record) + "\n" for record in (first, deleted)))
    run(replace(stream_sweep, cases=("od*",)), options)
    assert [record.case for record in records.load(path)] == ["odd"]


def test_sweep_checks_every_own_variant_and_no_peer(tmp_path: Path, options: Options) -> None:
    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM)
    rows = run(Selection(str(path)), options)
    statuses = {(r.op, r.case, r.variant): r.status for r in rows}
    assert len(statuses) == len(rows) == 39  # derived: two of four backward and seven of nine forward cases
    for (op, case, variant), status in statuses.items():
        own = OPS[op].variant(variant)
        assert not own.is_peer
        skipped = case == "none" and variant != "optimized"
        assert status == ("skipped" if skipped else "checked"), (op, case, variant)
    assert every(record.reason for record in rows if record.status == "skipped")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (
            {"ops": ("rmsnorm_bwd",)},
            {
                ("rmsnorm_bwd", "small"),
                ("rmsnorm_bwd", "none"),
                *(("rmsnorm_bwd", f"big,{size}") for size in ("M=3", "M=32,N=40")),
            },
        ),
        ({"cases": ("sm*",)}, {("rmsnorm_fwd", "small"), ("rmsnorm_bwd", "small")}),
        ({"cases": ("none", "x"), "ops": ("rmsnorm_fwd",)}, {("rmsnorm_fwd", "none")}),
    ],
)
def test_sweep_of_a_selection_checks_its_rows_only(
    tmp_path: Path, options: Options, part: dict[str, Any], expected: set[Any]
) -> None:
    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM)
    rows = run(Selection(str(path), variants=("optimized",), **part), options)
    assert {(record.op, record.case) for record in rows} == expected
    assert {record.variant for record in rows} <= {"optimized"}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"cases": ("b*",)}, "no check case among the 4 selected: bench cases need a GPU"),
        ({"quants": ("fp8",), "variants": ("optimized",)}, "no check case among the 1 selected: bench cases need a GPU"),
        ({"cases": ("small",), "variants": ("eager",)}, "no installed variant to check in the 2 check cases selected"),
    ],
)
def test_sweep_that_checks_nothing_raises_and_writes_nothing(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch, part: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(Variant, "missing", lambda variant: variant.requires)
    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM)
    with pytest.raises(ValueError) as caught:
        run(Selection(str(path), **part), options)
    assert str(caught.value) == f"{path}: {message}"
    assert written(options) == []


@pytest.mark.parametrize("variants", [("eager", "optimized"), ("e*r", "opt*")])
def test_sweep_of_a_named_peer_checks_it(tmp_path: Path, options: Options, variants: tuple[str, ...]) -> None:
    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM)
    rows = run(Selection(str(path), cases=("small",), variants=variants), options)
    assert [(r.op, r.variant, r.status) for r in rows] == [
        (op, variant, "checked") for op in ("rmsnorm_fwd", "rmsnorm_bwd") for variant in ("optimized", "eager")
    ]


def test_sweep_after_an_interrupt_continues_behind_checked_cases_of_the_same_source(
    stream_sweep: Selection, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks of other source do not count."""
    log, stop_at = tmp_path / "log", {"even"}

    def check_runs(runs: Any) -> list[Outcome]:
        name = runs[0][0].case.name
        with log.open("a") as file:
            file.write(f"{name}\n")
        if name in stop_at:
            raise KeyboardInterrupt
        return [Outcome("checked") for _ in runs]

    monkeypatch.setattr(jobs, "check_runs", check_runs)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {0})
    with pytest.raises(KeyboardInterrupt):
        run(stream_sweep, options)
    journal = Path("runs/interpreter/tiny.check.journal.jsonl")
    assert written(options) == [journal]
    stop_at.clear()
    assert options.results is not None
    journal_text = (options.results / journal).read_text()
    spoken = Spoken()
    rows = run_sweep(load_plan(OPS, stream_sweep, options), spoken).records
    assert spoken.stages == [("check", 2), ("check further configs and sizes", 2)]
    assert (spoken.kept[0], spoken.steps[0]) == (1, "stream even int32 none")
    assert log.read_text().split() == ["odd", "even", "even"]
    assert [(r.case, r.status) for r in rows] == [("odd", "checked"), ("even", "checked")]
    assert written(options) == [Path("runs/interpreter/tiny.check.jsonl")]
    (options.results / journal).write_text(
        journal_text.replace(OPS["stream"].variant("baseline").source_hash, "older") + '{"op": "stre'
    )
    log.unlink()
    run(stream_sweep, options)
    assert log.read_text().split() == ["odd", "even"]


def test_interrupt_of_a_check_of_pairs_keeps_checked_cases(
    stream_sweep: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_pairs(*_: Any) -> list[Outcome]:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "check_pairs", check_pairs)
    with pytest.raises(KeyboardInterrupt):
        run(stream_sweep, options)
    (journal,) = written(options)
    assert options.results is not None
    assert sorted(row.case for row in Journal(options.results / journal).rows) == ["even", "odd"]  # either may end first


def test_sweep_run_imports_no_checks_of_the_interpreter() -> None:
    modules = {"kerneltune.cpu_checks", "kerneltune.checking.jobs", "kerneltune.checking.mutations"}
    code = (
        f"import kerneltune.sweep_run, kerneltune.adopt.tuning, kerneltune.tune.run, sys; print({modules} & sys.modules.keys())"
    )
    assert subprocess.run([python(), "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_selection_without_a_case_raises_with_the_nearest_name(tmp_path: Path, options: Options) -> None:
    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM)
    with pytest.raises(ValueError, match=r"norm.yaml: no case with case=smal dtype=bfloat16,float16; did you mean small\?$"):
        run(Selection(str(path), cases=("smal",), dtypes=("bfloat16", "float16")), options)


def no_values(_inputs: Any) -> Any:
    raise RuntimeError("not enough memory: you tried to allocate 99 bytes\nat allocator.cpp")


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (
            {"reference": no_values},
            r"^test_sweep_run.py:\d+: reference: RuntimeError: not enough memory: you tried to allocate 99 bytes, for stream ",
        ),
        ({"inputs": lambda *_, **__: no_values(None)}, r"^test_sweep_run.py:\d+: inputs: RuntimeError: not enough memory"),
        (
            {"reference": lambda _: {"other": 1}, "compare": lambda *arguments: [arguments[2]["other"]]},
            "^outputs: the reference gives other, ",
        ),
        ({"compare": lambda *_: None}, r"^test_sweep_run.py:\d+: compare: None: expected a list of lines"),
    ],
)
def test_operator_that_raises_outside_of_its_kernels_has_failed_records(
    stream_sweep: Selection, options: Options, broken: dict[str, Any], reason: str
) -> None:
    operators = {**OPS, "stream": replace(OPS["stream"], **broken)}
    rows = run_sweep(load_plan(operators, stream_sweep, options), Progress()).records
    assert rows
    assert {record.status for record in rows} == {"failed"}
    assert every(re.search(reason, record.reason) for record in rows)


def raising(*_: Any) -> Any:
    raise RuntimeError("y: 1 of 2 wrong")


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"compare": lambda *_: ["y: 1 of 2 wrong"]}, "are inputs and reference"),
        ({"reference": raising}, "are inputs and reference"),
        ({"inputs": raising}, "are inputs and reference"),
        ({"compare": raising}, "is compare"),
        ({"compare": lambda *_: None}, "is compare"),
        ({"compare": lambda *_: []}, ""),
    ],
)
def test_check_asks_for_inputs_reference_or_compare_where_all_variants_fail(
    options: Options, tmp_path: Path, broken: dict[str, Any], named: str
) -> None:
    notes: list[str] = []

    class Notes(Progress):
        def note(self, text: str) -> None:
            notes.append(text)

    (tmp_path / "norm.yaml").write_text(RMSNORM)
    selection = Selection(str(tmp_path / "norm.yaml"), ops=("rmsnorm_fwd",), cases=("small",), variants=("baseline", "pr593"))
    swept = run_sweep(load_plan({**OPS, "rmsnorm_fwd": replace(OPS["rmsnorm_fwd"], **broken)}, selection, options), Notes())
    assert any("no check has" in it.reason for it in swept.coverage if it.status == "noted") is not bool(named)
    assert notes == [f"rmsnorm_fwd: all 2 variants fail in all cases: {named} right?"] * bool(named)


def test_case_larger_than_free_memory_is_skipped(
    stream_sweep: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "host_free_bytes", lambda: 262_143)
    odd, even = run(stream_sweep, options)
    assert odd.status == "checked"
    assert (even.status, even.reason) == ("skipped", "needs 262,144 bytes, 262,143 are free")


def test_variant_with_wrong_results_has_a_failed_record_with_the_reason(
    stream_sweep: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(self: Checker, _variant: Variant, config: Any) -> tuple[Outputs, list[str]]:
        return {}, ["dst: 1 of 2 words wrong", "too late"] if self.case.name == "odd" and config == default else []

    default = OPS["stream"].variants[0].default_config(Case("any", (("read", 4), ("write", 4)), "int32"))
    monkeypatch.setattr(Checker, "run", checked)
    odd, even = run(stream_sweep, options)
    assert (odd.status, odd.reason) == ("failed", "dst: 1 of 2 words wrong; too late")
    assert even.status == "checked"


def test_config_with_wrong_results_has_a_failed_record_of_its_own(
    stream_sweep: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(self: Checker, variant: Variant, config: Any) -> tuple[Outputs, list[str]]:
        return {}, [] if config == variant.default_config(self.case) else ["dst: 2 of 2 words wrong"]

    monkeypatch.setattr(Checker, "run", checked)
    odd, even, *others = run(stream_sweep, options)
    assert (odd.status, even.status) == ("checked", "checked")
    assert {r.case for r in others} <= {"odd", "even"}
    assert {(r.status, r.reason) for r in others} == {("failed", "dst: 2 of 2 words wrong")}
    assert every(record.config != odd.config for record in others)


def test_variant_without_knobs_that_keeps_its_first_result_has_a_failed_record(stream_sweep: Selection, options: Options) -> None:
    op, kept = OPS["stream"], dict[int, Any]()

    def run(inputs: Any, _config: None) -> Any:
        return kept.setdefault(inputs["src"].numel(), op.reference(inputs))

    operators = {**OPS, "stream": replace(op, variants=(Variant("kept", run),))}
    odd, even, *again = run_sweep(load_plan(operators, stream_sweep, options), Progress()).records
    assert (odd.status, even.status) == ("checked", "checked")
    begin = "right alone in a new process, and wrong after a call with other values: "
    assert [(record.case, record.status, record.reason[: len(begin)]) for record in again] == [
        ("odd", "failed", begin), ("even", "failed", begin)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (lambda s, o: run_tune(load_plan(OPS, s, o), Progress()), "tune needs a GPU: in the interpreter nothing can be timed"),
        (
            lambda s, o: measure_live(load_plan(OPS, s, o), Progress(), "compare --run"),
            "compare --run needs a GPU: in the interpreter nothing can be timed",
        ),
    ],
    ids=["tune", "compare"],
)
def test_command_that_needs_a_gpu_raises_without_one_and_writes_nothing(
    stream_sweep: Selection, options: Options, command: Callable[[Selection, Options], Any], text: str
) -> None:
    with pytest.raises(ValueError) as caught:
        command(stream_sweep, options)
    assert str(caught.value) == text
    assert written(options) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ops": ("strem",)}, "op: 'strem': did you mean stream? expected one of "),
        ({"variants": ("optimised",)}, "variant: 'optimised': expected one of baseline in family tiny"),
        ({"variants": ("baseline", "liger")}, "variant: 'liger': expected one of baseline in family tiny"),
        ({"family": "no-such-family"}, "family: 'no-such-family': expected one of "),
        ({"family": "no/such.yaml"}, "cannot read no/such.yaml: no such file"),
    ],
)
def test_sweep_of_unknown_names_raises_one_line_before_anything_runs(
    stream_sweep: Selection, options: Options, change: dict[str, Any], text: str
) -> None:
    progress = Spoken()
    with pytest.raises(ValueError) as caught:
        run_sweep(load_plan(OPS, replace(stream_sweep, **change), options), progress)
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
    assert progress.stages == []
    assert written(options) == []


def test_sweep_with_an_unwritable_results_folder_raises_one_line(stream_sweep: Selection, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^cannot write .*tiny\.check\.journal\.jsonl: ") as caught:
        run(stream_sweep, Options(results=tmp_path / "file"))
    assert "\n" not in str(caught.value)


AHEAD = """
from kerneltune import ops
from kerneltune.sweep_run import compile_ahead
from kerneltune.measuring.assembly import TARGETS
from kerneltune.task import Run, Task
from kerneltune.spec import Case

op = ops.load()["stream"]
cases = [Case("some", (("read", size), ("write", size)), "int32") for size in (4096, 8192)]
tasks = [Task(op, case, op.variants[0]) for case in cases]
work = [Run(task, task.default) for task in tasks]
print([([kernel.name for kernel in found.kernels], found.error) for found in compile_ahead(work, TARGETS["sm_90"], 1)])
"""


def test_check_compiles_its_kernels_ahead_in_other_processes() -> None:
    """Check in a process of its own: this process has Triton's interpreter on."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([python(), "-c", AHEAD], capture_output=True, text=True, env=env, timeout=800)
    assert done.stdout.strip() == "[(['_stream'], ''), (['_stream'], '')]", done.stderr
