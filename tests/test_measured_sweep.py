"""A sweep with a GPU that is only pretended: what a launch costs that takes its process along, what an interrupted run leaves."""

import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_jobs import FakeCheck
from literal_records import literal
from small_sweeps import RMSNORM, STREAM

from kerneltune import campaign, device, ops, records
from kerneltune.campaign import compare_live, measure_live, run_quick, run_sweep
from kerneltune.measuring import compare
from kerneltune.measuring.compare import config_values
from kerneltune.plan import Options, Quiet, Selection
from kerneltune.records import Record
from kerneltune.spec import Case
from kerneltune.sweep_journal import finished_rows, journalled
from kerneltune.tuning import isolated

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")

OPS = ops.load()
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
        "status": "skipped",
        "reason": "x",
        "device": device.current().name,
        "driver": device.current().driver,
        "config": CONFIGS.get(variant),
        "torch": device.versions()["torch"],
        "triton": device.versions()["triton"],
        "source_hash": OP.variant(variant).source_hash,
        "commit": "c",
        "date": "2026-01-01T00:00:00+00:00",
        "axes": dict(CASE.axes),
        "options": dict(CASE.options),
    }
    return Record(**values | changes)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(results=tmp_path / "results", configs=tmp_path / "configs")


@pytest.fixture
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = device.Device("NVIDIA H200", "sm_90", 132, 60_000_000, "580")
    monkeypatch.setattr(device, "current", lambda: h200)
    monkeypatch.setattr(compare, "memory_obstacle", lambda *_: None)
    monkeypatch.setattr(campaign, "compile_ahead", lambda *_: None)


@pytest.mark.usefixtures("an_h200")
def test_a_check_that_takes_its_process_along_costs_only_its_row(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.yaml").write_text(STREAM)
    monkeypatch.setattr(campaign, "CheckBench", FakeCheck)
    rows = run_sweep(OPS, Selection(str(tmp_path / "tiny.yaml")), replace(options, check_only=True), Quiet()).records
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
                raise compare.BrokenContextError(faults[op.name].pop(), "an illegal memory access")
            return [measured_row(op, case, variant.name, lost.get(variant.name, "")) for variant, _ in pairs]

        return compared

    monkeypatch.setattr(campaign, "compare", comparing("here"))
    monkeypatch.setattr(campaign, "compare_in_child", comparing("in a child"))
    found = compare_live(OPS, Selection(str(path), quants=("none",)), "baseline", "optimized", options, Quiet())
    assert where == ["here", *["in a child"] * 3]
    assert [(r.op, r.variant, r.reason) for r in found] == [
        ("rmsnorm_fwd", "baseline", "x"),
        ("rmsnorm_fwd", "optimized", "an illegal memory access"),
        ("rmsnorm_bwd", "baseline", "an illegal memory access"),
        ("rmsnorm_bwd", "optimized", "an illegal memory access"),
    ]


@pytest.mark.usefixtures("an_h200")
def test_one_variant_alone_is_measured_twice(tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(_f: str, op: Any, case: Case, pairs: Any, *_: object) -> list[Record]:
        return [measured_row(op, case, variant.name, "") for variant, _ in pairs]

    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM)
    monkeypatch.setattr(campaign, "compare", compared)
    selection = Selection(str(path), ("rmsnorm_bwd",))
    for a, b in (("pr593", "pr593"), ("baseline", "optimized")):
        found = compare_live(OPS, selection, a, b, options, Quiet())
        assert [(record.case, record.variant) for record in found] == [("big", a), ("big", b)]


@pytest.mark.usefixtures("an_h200")
def test_quick_sweep_shows_a_first_table_before_peers_that_compile(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No check and no search; the second time all variants are measured beside each other, and replace what was kept."""
    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM + "  - {name: other, M: 32, N: 64}\nheadline: {op: rmsnorm_bwd}\n")
    happened: list[tuple[str, ...]] = []

    def compared(_f: str, op: Any, case: Case, pairs: Any, *_: object) -> list[Record]:
        happened.append((op.name, case.name, *(variant.name for variant, _ in pairs)))
        return [measured_row(op, case, variant.name, f"{len(happened)}") for variant, _ in pairs]

    monkeypatch.setattr(campaign, "compare", compared)
    shown: list[int] = []
    swept = run_quick(OPS, Selection(str(path)), options, Quiet(), lambda rows: shown.append(len(rows) + len(happened)))
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

    def compared(_f: str, op: Any, case: Case, pairs: Any, *_: object) -> list[Record]:
        happened.append("whole" if "compile" in {variant.name for variant, _ in pairs} else "fast")
        if happened[-1] == "whole" and interrupts:
            raise interrupts.pop()
        return [measured_row(op, case, variant.name, "") for variant, _ in pairs]

    class Checked:
        def __init__(self, *_: object, **__: object) -> None:
            happened.append("check")

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(campaign, "compare", compared)
    monkeypatch.setattr(campaign, "IsolatedBench", Checked)
    monkeypatch.setattr(campaign, "check_only", lambda *_: [])
    selection, given = Selection(str(path), ("rmsnorm_bwd",)), replace(options, tune=False)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(OPS, selection, given, Quiet(), lambda rows: happened.append(f"table of {len(rows)}"))
    assert happened[:2] == ["fast", f"table of {len([v for v in OP.variants if not v.compiles and not v.missing()])}"]
    assert happened[2:] == ["check", "whole"]
    assert options.results is not None
    journal = options.results / "runs" / "nvidia_h200" / "norm.journal.jsonl"
    records.append(journal, [row("baseline")])
    happened.clear()
    run_sweep(OPS, selection, given, Quiet(), lambda _: happened.append("table"))
    assert happened == ["check", "whole"]


def test_a_fresh_process_finds_all_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def here(count: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        assert count == 1
        return [work(*pickle.loads(pickle.dumps(args)))]

    monkeypatch.setattr(isolated, "in_fresh_processes", here)
    monkeypatch.setattr(isolated, "compare", lambda *given: given)
    stream = OPS["stream"]
    beside = Case("c", (("read", 64), ("write", 64)), "int32")
    ceiling = compare.Ceiling(stream, stream.variants[0], stream.variants[0].default_config(beside), beside)
    lost = {"baseline": "it faults"}
    assert isolated.compare_in_child("f", OP, CASE, PAIRS, "hot", ceiling, lost) == ("f", OP, CASE, PAIRS, "hot", ceiling, lost)
    assert isolated.compare_in_child("f", OP, CASE, PAIRS, "hot", None, {})[5] is None  # type: ignore[comparison-overlap]


# what an interrupted run left


def still_good(rows: list[Record], policy: str = "cold") -> list[Record] | None:
    """Rows as the journal gives them back."""
    loaded = [records.from_json(json.dumps(json.loads(records.to_json(r)))) for r in rows]
    done = {(r.key, r.variant): [r] for r in loaded}
    return finished_rows(done, OP, CASE, PAIRS, policy)


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
        [row("baseline"), row("optimized", device="another GPU")],
        [row("baseline"), row("optimized", unit="another GPU of the model")],
        [row("baseline"), row("optimized", status="failed")],
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
    ids=[
        "none",
        "one",
        "source",
        "driver",
        "device",
        "unit",
        "failed",
        "triton",
        "torch",
        "config",
        "axes",
        "dtype",
        "quant",
        "options",
        "policy",
        "op",
    ],
)
def test_a_case_that_lacks_a_row_of_this_source_is_measured_again(rows: list[Record]) -> None:
    assert still_good(rows) is None


def test_a_journal_row_that_was_being_written_is_not_read(tmp_path: Path) -> None:
    journal = tmp_path / "runs" / "rmsnorm.journal.jsonl"
    assert journalled(journal) == []
    rows = [row("baseline"), row("optimized")]
    records.append(journal, rows)
    whole = journal.read_bytes()
    journal.write_bytes(whole + whole[:100])
    assert journalled(journal) == rows
    assert journal.read_bytes() == whole + whole[:100]


def test_rows_under_another_policy_do_not_count() -> None:
    rows = [row("baseline"), row("optimized")]
    assert still_good(rows, "hot") is None
    assert still_good(rows) == rows


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
        known = {"source_hash": pairs[0][0].source_hash, "driver": "580", "config": config_values(pairs[0][1])}
        return [row(pairs[0][0].name, **identity, **known)]

    monkeypatch.setattr(campaign, "compare", comparing)
    given = replace(options, tune=False)
    selection = Selection(str(path), cases=("big*",))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(OPS, selection, given, Quiet())
    assert options.results is not None
    journal = options.results / "runs" / "nvidia_h200" / "tiny.journal.jsonl"
    table = options.results / "nvidia_h200" / "tiny.csv"
    assert [record.case for record in records.load(table.with_suffix(".jsonl"))] == ["big"]
    assert ",big," in table.read_text()
    with journal.open("ab") as file:
        file.write(b'{"op": "stre')  # what was being written
    stages: list[tuple[str, int, int]] = []
    steps: list[str] = []

    class Spoken(Quiet):
        def stage(self, name: str, total: int, kept: int = 0, costs: Sequence[float] = ()) -> None:
            stages.append((name, total, kept))

        def advance(self, text: str) -> None:
            steps.append(text)

    swept = run_sweep(OPS, selection, given, Spoken())
    assert stages[-1] == ("measure", 2, 1)
    assert steps[-1:] == ["stream bigger int32 none"]
    assert sum("big" in s for s in steps) == 1
    assert measured == ["big", "bigger", "bigger"]
    assert [record.case for record in swept.records] == ["big", "bigger"]
    assert swept.files == [options.results / "nvidia_h200" / name for name in ("tiny.jsonl", "tiny.md", "tiny.csv")]
    assert records.load(swept.files[0]) == swept.records
    assert not journal.exists()


@pytest.mark.usefixtures("an_h200")
def test_a_sweep_says_where_its_files_rank_otherwise_under_another_policy(
    tmp_path: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    us = {("baseline", "cold"): 10.0, ("optimized", "cold"): 20.0, ("baseline", "hot"): 20.0, ("optimized", "hot"): 10.0}

    def compared(_f: str, op: Any, case: Case, pairs: Any, policy: str, *_: object) -> list[Record]:
        of_case = {"op": op.name, "case": case.name, "axes": dict(case.axes), "options": dict(case.options)}
        of_run = {"dtype": case.dtype, "quant": case.quant, "policy": policy}
        return [literal(us[variant.name, policy], variant=variant.name, **of_case, **of_run) for variant, _ in pairs]

    path = tmp_path / "norm.yaml"
    path.write_text(RMSNORM)
    monkeypatch.setattr(campaign, "compare", compared)
    selection = Selection(str(path), ("rmsnorm_bwd",), cases=("big",), variants=("baseline", "optimized"))
    cold, hot = (run_sweep(OPS, selection, replace(options, tune=False, policy=policy), Quiet()) for policy in ("cold", "hot"))
    flips = (
        "ranks flip in 1 of 1 cases with several policies; baseline is faster than optimized cold, slower hot: big float32 none"
    )
    assert (cold.remark, hot.remark) == ("", flips)
    assert hot.files[1].read_text().endswith(f"\n- {flips}\n")
