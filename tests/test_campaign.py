"""A sweep without a GPU: what is checked, where it is written, what is refused, what an interrupted run leaves to resume."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_jobs import FakeCheck

from kerneltune import campaign, device, ops, records
from kerneltune.campaign import _journalled, _still_good, compare_live, measure_live, run_sweep
from kerneltune.device import INTERPRETER
from kerneltune.measuring import compare
from kerneltune.measuring.check import Checker
from kerneltune.measuring.compare import config_values
from kerneltune.plan import Options, Quiet, Selection, results_folder
from kerneltune.records import Record
from kerneltune.spec import Case, Variant
from kerneltune.tuning import apart
from kerneltune.tuning.run import run_tune

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")

OPS = ops.load()
STREAM = """
family: tiny
ops: [stream]
defaults: {dtype: int32}
check:
  - {name: odd, read: 4004, write: 4004}
  - {name: even, read: 8192, write: 4096}
bench:
  - {name: big, read: 1048576, write: 1048576}
"""
RMSNORM = """
family: norm
ops: [rmsnorm_fwd, rmsnorm_bwd]
defaults: {dtype: float32, zero_centered: false}
check:
  - {name: small, M: 3, N: 40, quant: none}
  - {name: none, M: 0, N: 64, quant: none}
bench:
  - {name: big, M: 64, N: 64}
"""


class Spoken(Quiet):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int]] = []
        self.steps: list[str] = []

    def stage(self, name: str, total: int) -> None:
        self.stages.append((name, total))

    def advance(self, text: str) -> None:
        self.steps.append(text)


@pytest.fixture
def stream_sweep(tmp_path: Path) -> Selection:
    path = tmp_path / "tiny.yaml"
    path.write_text(STREAM)
    return Selection(str(path))


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(results=tmp_path / "results", configs=tmp_path / "configs")


def run(selection: Selection, options: Options) -> list[Record]:
    return run_sweep(OPS, selection, options, Quiet()).records


def written(options: Options) -> list[Path]:
    assert options.results is not None
    found = [path for path in options.results.rglob("*") if path.is_file() and path.suffix != ".lock"]
    return sorted(path.relative_to(options.results) for path in found)


def test_without_a_gpu_a_sweep_only_checks(stream_sweep: Selection, options: Options) -> None:
    progress = Spoken()
    found = run_sweep(OPS, stream_sweep, options, progress).records
    assert [(r.op, r.variant, r.case, r.status) for r in found] == [
        ("stream", "baseline", "odd", "checked"),
        ("stream", "baseline", "even", "checked"),
    ]
    for record in found:
        assert record.device == INTERPRETER and record.family == "tiny" and record.source_hash == OPS["stream"].source_hash
        assert record.config == {"block": 1024, "warps": 8, "ctas": 0} and record.reason == ""
        assert [record.time_us, record.gbps, record.ci_low_us, record.ci_high_us, record.n] == [None] * 5
    assert progress.stages == [("check", 2)]
    assert progress.steps == ["stream odd int32 none", "stream even int32 none"]


def test_checks_are_written_where_git_does_not_look_and_nowhere_else(stream_sweep: Selection, options: Options) -> None:
    swept = run_sweep(OPS, stream_sweep, options, Quiet())
    assert written(options) == [Path("runs/interpreter/tiny.check.jsonl")]
    path = options.results / "runs" / "interpreter" / "tiny.check.jsonl"  # type: ignore[operator]
    assert swept.files == [path] and records.load(path) == swept.records
    assert results_folder(options) == options.results / "runs" / "interpreter"  # type: ignore[operator]
    assert options.configs is not None and not options.configs.exists()


def test_the_results_folder_of_the_environment(stream_sweep: Selection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELTUNE_RESULTS", str(tmp_path / "elsewhere"))
    run(stream_sweep, Options())
    assert (tmp_path / "elsewhere" / "runs" / "interpreter" / "tiny.check.jsonl").is_file()


def test_a_second_run_replaces_its_rows_and_keeps_the_others(stream_sweep: Selection, options: Options) -> None:
    path = options.results / "runs" / "interpreter" / "tiny.check.jsonl"  # type: ignore[operator]
    run(stream_sweep, options)
    old = [replace(record, date="2020-01-01T00:00:00+00:00") for record in records.load(path)]
    path.write_text("".join(records.to_json(record) + "\n" for record in old))
    again = run(replace(stream_sweep, cases=("od*",)), options)
    assert [record.case for record in again] == ["odd"]
    after = records.load(path)
    assert [record.case for record in after] == ["odd", "even"]
    assert after == [again[0], old[1]] and after[0].date != old[0].date


def test_every_own_variant_is_checked_and_no_peer(tmp_path: Path, options: Options) -> None:
    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM)
    found = run(Selection(str(path)), options)
    statuses = {(r.op, r.case, r.variant): r.status for r in found}
    assert len(statuses) == len(found) == 12
    for (op, case, variant), status in statuses.items():
        own = OPS[op].variant(variant)
        assert not own.is_peer
        skipped = case == "none" and variant != "optimized"
        assert status == ("skipped" if skipped else "checked"), (op, case, variant)
    assert all(record.reason for record in found if record.status == "skipped")


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"ops": ("rmsnorm_bwd",)}, {("rmsnorm_bwd", "small"), ("rmsnorm_bwd", "none")}),
        ({"cases": ("sm*",)}, {("rmsnorm_fwd", "small"), ("rmsnorm_bwd", "small")}),
        ({"cases": ("none", "x"), "ops": ("rmsnorm_fwd",)}, {("rmsnorm_fwd", "none")}),
        ({"dtypes": ("bfloat16",)}, set()),
        ({"quants": ("fp8",)}, set()),
    ],
)
def test_a_selection_takes_a_part(tmp_path: Path, options: Options, part: dict[str, Any], expected: set[Any]) -> None:
    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM)
    found = run(Selection(str(path), variants=("optimized",), **part), options)
    assert {(record.op, record.case) for record in found} == expected
    assert {record.variant for record in found} <= {"optimized"}


def test_a_wrong_kernel_is_a_failed_record_that_says_why(
    stream_sweep: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def errors(self: Checker, variant: Variant, config: Any) -> list[str]:
        return ["dst: 1 of 2 words wrong", "too late"] if self.case.name == "odd" else []

    monkeypatch.setattr(Checker, "errors", errors)
    odd, even = run(stream_sweep, options)
    assert (odd.status, odd.reason) == ("failed", "dst: 1 of 2 words wrong; too late")
    assert even.status == "checked"


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = device.Device("NVIDIA H200", "sm_90", 132, 60_000_000, 232448, "580")
    monkeypatch.setattr(device, "current", lambda: h200)
    monkeypatch.setattr(compare, "memory_shortage", lambda *_: None)
    monkeypatch.setattr(campaign, "compile_ahead", lambda *_: None)


@pytest.mark.usefixtures("an_h200")
def test_on_a_gpu_a_check_that_takes_its_process_along_costs_only_its_row(
    stream_sweep: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "CheckBench", FakeCheck)
    rows = run(stream_sweep, replace(options, check_only=True))
    assert {(row.case, row.config["block"]) for row in rows if row.config} >= {("odd", 1024), ("even", 1024), ("even", 512)}
    for row in rows:
        assert row.config is not None
        fate = {
            512: ("failed", "lost: the measuring process died: exit code -6"),
            4096: ("failed", "dst: 1 of 2 words wrong"),
        }.get(row.config["block"], ("checked", ""))
        assert (row.status, row.reason) == fate, row.config


def measured_row(op: Any, case: Case, variant: str, reason: str) -> Record:
    return row(variant, op=op.name, case=case.name, reason=reason or "x", axes=dict(case.axes), options=dict(case.options))


@pytest.mark.usefixtures("an_h200")
def test_a_measurement_that_takes_the_context_along_costs_only_its_row(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From then on a fresh process measures, as this one no longer can; of a launch that nobody is known for all rows fail."""
    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM)
    faults = {"rmsnorm_fwd": ["optimized"], "rmsnorm_bwd": [""]}
    where: list[str] = []

    def comparing(name: str) -> Callable[..., list[Record]]:
        def compared(_f: str, op: Any, case: Case, pairs: Any, _p: str, _c: object, lost: dict[str, str]) -> list[Record]:
            where.append(name)
            if faults[op.name]:
                raise compare.ContextLostError(faults[op.name].pop(), "an illegal memory access")
            return [measured_row(op, case, variant.name, lost.get(variant.name, "")) for variant, _ in pairs]

        return compared

    monkeypatch.setattr(campaign, "compare", comparing("here"))
    monkeypatch.setattr(campaign, "compare_apart", comparing("apart"))
    found = compare_live(OPS, Selection(str(path), quants=("none",)), "baseline", "optimized", options, Quiet())
    assert where == ["here", "apart", "apart", "apart"]
    assert [(r.op, r.variant, r.reason) for r in found] == [
        ("rmsnorm_fwd", "baseline", "x"),
        ("rmsnorm_fwd", "optimized", "an illegal memory access"),
        ("rmsnorm_bwd", "baseline", "an illegal memory access"),
        ("rmsnorm_bwd", "optimized", "an illegal memory access"),
    ]


def test_a_fresh_process_finds_all_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(count: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        assert count == 1
        return [work(*pickle.loads(pickle.dumps(args)))]

    monkeypatch.setattr(apart, "in_fresh_processes", here)
    monkeypatch.setattr(apart, "compare", lambda *given: given)
    stream = OPS["stream"]
    beside = Case("c", (("read", 64), ("write", 64)), "int32")
    ceiling = compare.Ceiling(stream, stream.variants[0], stream.variants[0].default_config(beside), beside)
    lost = {"baseline": "it faults"}
    assert apart.compare_apart("f", OP, CASE, PAIRS, "hot", ceiling, lost) == ("f", OP, CASE, PAIRS, "hot", ceiling, lost)
    assert apart.compare_apart("f", OP, CASE, PAIRS, "hot", None, {})[5] is None  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (lambda s, o: run_tune(OPS, s, o, Quiet()), "tune needs a GPU: in the interpreter nothing can be timed"),
        (
            lambda s, o: compare_live(OPS, s, "baseline", "optimized", o, Quiet()),
            "compare --run needs a GPU: in the interpreter nothing can be timed",
        ),
    ],
    ids=["tune", "compare"],
)
def test_what_needs_a_gpu_says_so_and_writes_nothing(
    stream_sweep: Selection, options: Options, command: Callable[[Selection, Options], Any], text: str
) -> None:
    with pytest.raises(ValueError) as caught:
        command(stream_sweep, options)
    assert str(caught.value) == text
    assert written(options) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ops": ("strem",)}, "unknown op 'strem'; there are "),
        ({"variants": ("optimised",)}, "unknown variant 'optimised' in family tiny"),
        ({"variants": ("baseline", "liger")}, "unknown variant 'liger' in family tiny"),
        ({"family": "no-such-family"}, "family: 'no-such-family': expected one of "),
        ({"family": "no/such.yaml"}, "cannot read no/such.yaml: no such file"),
    ],
)
def test_names_that_do_not_exist_are_one_line_and_nothing_runs(
    stream_sweep: Selection, options: Options, change: dict[str, Any], text: str
) -> None:
    progress = Spoken()
    with pytest.raises(ValueError) as caught:
        run_sweep(OPS, replace(stream_sweep, **change), options, progress)
    assert str(caught.value).startswith(text) and "\n" not in str(caught.value)
    assert progress.stages == [] and written(options) == []


def test_results_that_cannot_be_written_are_one_line(stream_sweep: Selection, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="^cannot write .*tiny.check.jsonl: ") as caught:
        run(stream_sweep, Options(results=tmp_path / "file"))
    assert "\n" not in str(caught.value)


# what an interrupted run left

CASE = Case("a", (("M", 8), ("N", 64)), "bfloat16", "none", (("zero_centered", False),))
OP = OPS["rmsnorm_bwd"]
BASELINE, OPTIMIZED = OP.variant("baseline"), OP.variant("optimized")
PAIRS = [(variant, variant.default_config(CASE)) for variant in (BASELINE, OPTIMIZED)]
CONFIGS = {variant.name: config_values(config) for variant, config in PAIRS}


def row(variant: str, **changes: Any) -> Record:
    values: dict[str, Any] = {
        "op": OP.name,
        "variant": variant,
        "case": CASE.name,
        "dtype": CASE.dtype,
        "quant": CASE.quant,
        "policy": "cold",
        "status": "failed",
        "reason": "x",
        "device": "NVIDIA H200",
        "driver": device.current().driver,
        "config": CONFIGS.get(variant),
        "torch": device.versions()["torch"],
        "triton": device.versions()["triton"],
        "source_hash": OP.source_hash,
        "commit": "c",
        "date": "2026-01-01T00:00:00+00:00",
        "axes": dict(CASE.axes),
        "options": dict(CASE.options),
    }
    return Record(**values | changes)


def still_good(rows: list[Record], policy: str = "cold") -> list[Record] | None:
    """Rows as the journal gives them back."""
    loaded = [records.from_json(json.dumps(json.loads(records.to_json(r)))) for r in rows]
    done = {(r.key, r.variant): r for r in loaded}
    return _still_good(done, OP, CASE, PAIRS, Options(policy=policy))


def test_a_complete_case_is_resumed_in_the_order_of_the_variants() -> None:
    rows = [row("optimized"), row("baseline")]
    assert still_good(rows) == [rows[1], rows[0]]
    assert still_good([*rows, row("pr593")]) == [rows[1], rows[0]]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row("baseline")],
        [row("baseline"), row("optimized", source_hash="older")],
        [row("baseline"), row("optimized", driver="older")],
        [row("baseline"), row("optimized", triton="older")],
        [row("baseline"), row("optimized", torch="older")],
        [row("baseline"), row("optimized", config={"rows": 4})],
        [row("baseline"), row("optimized", axes={"M": 9, "N": 64})],
        [row("baseline"), row("optimized", dtype="float16")],
        [row("baseline"), row("optimized", quant="fp8")],
        [row("baseline"), row("optimized", options={"zero_centered": True})],
        [row("baseline"), row("optimized", policy="hot")],
        [row("baseline"), row("optimized", op="rmsnorm_fwd")],
    ],
    ids=["none", "one", "source", "driver", "triton", "torch", "config", "axes", "dtype", "quant", "options", "policy", "op"],
)
def test_a_case_that_lacks_a_row_of_this_source_is_measured_again(rows: list[Record]) -> None:
    assert still_good(rows) is None


def test_a_journal_row_that_was_being_written_is_not_read(tmp_path: Path) -> None:
    journal = tmp_path / "runs" / "rmsnorm.journal.jsonl"
    assert _journalled(journal) == []
    rows = [row("baseline"), row("optimized")]
    records.append(journal, rows)
    whole = journal.read_bytes()
    journal.write_bytes(whole + whole[:100])
    assert _journalled(journal) == rows and journal.read_bytes() == whole + whole[:100]


def test_rows_under_another_policy_do_not_count() -> None:
    rows = [row("baseline"), row("optimized")]
    assert still_good(rows, "hot") is None and still_good(rows) == rows


AHEAD = """
from kerneltune import ops
from kerneltune.campaign import compile_ahead
from kerneltune.measuring.compiler import TARGETS
from kerneltune.spec import Case

op = ops.load()["stream"]
variant = op.variants[0]
cases = [Case("some", (("read", size), ("write", size)), "int32") for size in (4096, 8192)]
work = [(op, case, [(variant, variant.default_config(case))]) for case in cases]
print([([kernel.name for kernel in found.kernels], found.error) for found in compile_ahead(work, TARGETS["sm_90"], 1)])
"""


def test_what_a_check_will_launch_is_compiled_before() -> None:
    """In a process of its own: this one has Triton's interpreter on."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", AHEAD], capture_output=True, text=True, env=env, timeout=120)
    assert done.stdout.strip() == "[(['_stream'], ''), (['_stream'], '')]", done.stderr


@pytest.mark.usefixtures("an_h200")
def test_what_is_measured_is_compiled_side_by_side_before(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(campaign, "compare", lambda *_: told.append(("measured", "")) or [])
    monkeypatch.setattr(
        campaign, "compile_ahead", lambda work, *_: told.extend((op.name, v.name) for op, _, pairs in work for v, _ in pairs)
    )
    path = tmp_path / "norm.yaml"
    cases = 'bench:\n  - {name: "n{N}", M: 64, N: [256, 512, 1024], quant: none}\n'
    path.write_text(f"family: norm\nops: [rmsnorm_fwd]\ndefaults: {{dtype: bfloat16, zero_centered: false}}\n{cases}")

    measure_live(OPS, Selection(str(path)), options, Quiet(), "test")
    own = [v.name for v in OPS["rmsnorm_fwd"].variants if not v.is_peer]
    ahead = [*[("rmsnorm_fwd", name) for name in own] * 3, *[("stream", OPS["stream"].variants[0].name)] * 3]
    assert told == [*ahead, *[("measured", "")] * 3]

    told.clear()
    measure_live(OPS, Selection(str(path), cases=("n256",)), options, Quiet(), "test")
    assert told == [("measured", "")], "few kernels are compiled where they are launched"


@pytest.mark.usefixtures("an_h200")
def test_an_interrupted_measurement_goes_on_where_it_was(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(STREAM + "  - {name: bigger, read: 2097152, write: 2097152}\n")
    measured: list[str] = []

    def comparing(_f: str, op: Any, case: Case, pairs: Any, *_: object) -> list[Record]:
        if case.name == "bigger" and "bigger" not in measured:
            measured.append("bigger")
            raise KeyboardInterrupt
        measured.append(case.name)
        identity = {"op": op.name, "case": case.name, "dtype": case.dtype, "axes": dict(case.axes), "options": {}}
        known = {"source_hash": op.source_hash, "driver": "580", "config": config_values(pairs[0][1])}
        return [row(pairs[0][0].name, **identity, **known)]

    monkeypatch.setattr(campaign, "compare", comparing)
    given = replace(options, tune=False)
    selection = Selection(str(path), cases=("big*",))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(OPS, selection, given, Quiet())
    assert options.results is not None
    journal = options.results / "runs" / "nvidia_h200" / "tiny.journal.jsonl"
    with journal.open("ab") as file:
        file.write(b'{"op": "stre')  # what was being written
    swept = run_sweep(OPS, selection, given, Quiet())
    assert measured == ["big", "bigger", "bigger"] and [record.case for record in swept.records] == ["big", "bigger"]
    assert swept.files == [options.results / "nvidia_h200" / name for name in ("tiny.jsonl", "tiny.md", "tiny.csv")]
    assert records.load(swept.files[0]) == swept.records and not journal.exists()
