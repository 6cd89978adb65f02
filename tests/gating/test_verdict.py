"""Test the gate's outcomes and exit codes on literal records, its use of processes, and further measurements."""

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gate_rows import by_process, record, untimed
from msgspec.structs import replace

from kerneltune.gating.verdict import confirm, gate
from kerneltune.records import Record, load
from kerneltune.spec import Role
from kerneltune.stats import shifts


@pytest.mark.parametrize(
    ("old", "new", "verdict", "code"),
    [
        pytest.param(record(), record(), "pass", 0, id="the same"),
        pytest.param(record(), record(101.5), "slower", 0, id="slower within the margin"),
        pytest.param(record(), record(102.9), "ambiguous", 3, id="perhaps beyond the margin"),
        pytest.param(record(), record(110.0), "regression", 1, id="surely beyond"),
        pytest.param(record(), record(103.5), "ambiguous", 3, id="beyond, not surely"),
        pytest.param(record(), record(110.0, spread=9.0), "ambiguous", 3, id="beyond, wide interval"),
        pytest.param(record(), record(90.0), "faster", 0, id="faster"),
        pytest.param(record(), record(96.5), "pass", 0, id="faster, not surely"),
        pytest.param(record(), record(110.0, aa_floor=0.2), "ambiguous", 3, id="below the noise of the new record"),
        pytest.param(record(), record(spread=9.0), "ambiguous", 3, id="unknown to 9 %"),
        pytest.param(record(4.0, spread=0.2), record(4.0, spread=0.2), "pass", 0, id="unknown by less than 0.5 µs"),
        pytest.param(record(aa_floor=0.09), record(110.0), "ambiguous", 3, id="below the noise of the baseline"),
        pytest.param(record(4.0, spread=0.01), record(4.47, spread=0.01), "slower", 0, id="slower by less than 0.5 µs"),
        pytest.param(record(4.0, spread=0.01), record(4.49, spread=0.01), "ambiguous", 3, id="perhaps by 0.5 µs"),
        pytest.param(record(4.0, spread=0.01), record(4.51, spread=0.01), "regression", 1, id="by more than 0.5 µs"),
        pytest.param(record(4.0, spread=0.01), record(3.51, spread=0.01), "pass", 0, id="faster by less than 0.5 µs"),
    ],
)
def test_gate_of_one_row_gives_verdict_and_exit_code(old: Record, new: Record, verdict: str, code: int) -> None:
    answer = gate([old], [new], 0.03)
    assert [row.verdict for row in answer.rows] == [verdict]
    assert answer.exit_code == code


def test_gate_change_has_the_bounds_of_both_intervals() -> None:
    (row,) = gate([record(spread=1.0)], [record(110.0, spread=2.0)], 0.03).rows
    assert row.change is not None
    assert row.change.slowdown == pytest.approx(0.10)
    assert row.change.low == pytest.approx(108 / 101 - 1)
    assert row.change.high == pytest.approx(112 / 99 - 1)


@pytest.mark.parametrize("us", [1e-6, 1e15])
def test_gate_of_times_without_proportion_gives_a_verdict(us: float) -> None:
    """A ratio of 1e-18 less 1 is -1 in floating point, whose logarithm does not exist."""
    sizes = [{"axes": {"M": size, "N": 8}} for size in range(1, 13)]
    old, new = ([record(time_us, spread=0.0, gbps=1e9 / time_us, **size) for size in sizes] for time_us in (1e12, us))
    answer = gate(old, new, 0.03)
    assert {row.verdict for row in answer.rows} == {"faster" if us < 1 else "regression"}
    assert gate(old[:1], new[:1], 0.03).exit_code == answer.exit_code


def test_gate_of_times_in_another_unit_is_ambiguous() -> None:
    """Times in ms look a thousand times faster; times of the same bytes do not, whatever the speed-up."""
    (row,) = gate([record(100.0)], [record(0.1, spread=0.0)], 0.03).rows
    assert (row.verdict, row.reason) == (
        "ambiguous", "100 MB before, now 0.1, as time_us times gbps: another unit, or another traffic?; one process a side",
    )  # fmt: skip
    assert gate([record(100.0)], [record(0.1, spread=0.0, gbps=1e6)], 0.03).exit_code == 0


def test_gate_of_a_missing_skipped_or_failed_row_exits_with_1() -> None:
    kept = record(quant="none")
    missing = gate([record(), kept], [kept], 0.03)
    assert [(row.verdict, row.reason) for row in missing.rows] == [("pass", ""), ("missing", "not in the new records")]
    assert (missing.exit_code, missing.reason) == (1, "1 missing")
    skipped = gate([record(), kept], [kept, untimed("skipped", "liger is not installed")], 0.03)
    assert skipped.rows[1].reason == "skipped in the new records: liger is not installed"
    assert skipped.exit_code == 1
    unchecked = gate([record(), kept], [kept, untimed("checked", "")], 0.03)
    assert unchecked.rows[1].reason == "not timed in the new records"
    failed = gate([record()], [untimed("failed")], 0.03)
    assert [(row.verdict, row.reason) for row in failed.rows] == [("failed", "y: values differ")]
    assert failed.exit_code == 1
    new_and_failed = gate([kept], [kept, untimed("failed")], 0.03)
    assert [row.verdict for row in new_and_failed.rows] == ["pass", "failed"]
    assert new_and_failed.exit_code == 1


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ([], [record()], "nothing compared: baseline has no records"),
        ([record()], [], "nothing compared: new has no records"),
        ([record()], [record(quant="none")], "nothing compared: no row of the baseline is timed in the new records"),
        ([untimed("skipped")], [record()], "nothing compared: no row of the baseline is timed in the new records"),
        (
            [record()],
            [record(device="NVIDIA H100")],
            "not comparable: baseline has device NVIDIA H200, new has NVIDIA H100",
        ),
        ([record()], [record(policy="hot")], "not comparable: baseline has policy cold, new has hot"),
        (
            [untimed("checked", "", device="interpreter")],
            [record()],
            "baseline holds records of the interpreter, whose times mean nothing",
        ),
        (
            [record()],
            [untimed("checked", "", device="interpreter")],
            "new holds records of the interpreter, whose times mean nothing",
        ),
    ],
)
def test_gate_of_records_that_cannot_be_compared_exits_with_2(old: list[Record], new: list[Record], reason: str) -> None:
    answer = gate(old, new, 0.03)
    assert (answer.exit_code, answer.reason) == (2, reason)


OWN = "runs"  # folder of records measured here
RESULTS = Path(__file__).parents[2] / "results"
SHIPPED = [path for path in sorted(RESULTS.rglob("*.jsonl")) if OWN not in path.relative_to(RESULTS).parts]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_gate_shipped_file_against_itself_in_any_order_passes(path: Path) -> None:
    rows = load(path)
    turned = [
        replace(row, axes=dict(reversed(row.axes.items())), options=dict(sorted(row.options.items()))) for row in reversed(rows)
    ]
    for other in (rows, turned):
        answer = gate(rows, other, 0.0)
        assert (answer.exit_code, answer.notes, {row.verdict for row in answer.rows if not row.note}) == (0, (), {"pass"})


def test_gate_failure_of_both_sides_is_a_note() -> None:
    broken = untimed("failed", quant="none")
    answer = gate([record(), broken], [record(), broken], 0.03)
    assert (answer.exit_code, answer.count("failed")) == (0, 0)
    assert [(row.verdict, bool(row.note), row.reason) for row in answer.rows] == [
        ("pass", False, ""), ("failed", True, "fails in the baseline as well; y: values differ"),
    ]  # fmt: skip
    only_new = gate([record(), untimed("skipped", quant="none")], [record(), broken], 0.03)
    assert (only_new.exit_code, only_new.reason) == (1, "1 failed")


@pytest.mark.parametrize("new", [[untimed("failed", variant="eager", role="peer")], [], [record(150.0, variant="eager")]])
def test_gate_peer_that_got_worse_is_a_note_unless_asked(new: list[Record]) -> None:
    old = [record(), record(variant="eager", role="peer")]
    answer = gate(old, [record(), *new], 0.03)
    assert answer.exit_code == 0
    assert answer.rows[1].note
    assert answer.rows[1].reason.startswith("a peer; ")
    assert gate(old, [record(), *new], 0.03, peers=True).exit_code == 1


def test_gate_new_option_at_its_default_is_the_same_row() -> None:
    old = [record(options={"pad": 0})]
    new = [record(options={"pad": 0, "layout": "row"}), record(150.0, options={"pad": 0, "layout": "both"})]
    assert gate(old, new[:1], 0.03).exit_code == 0
    without_defaults = gate(old, new, 0.03)
    assert (without_defaults.exit_code, without_defaults.reason.partition(":")[0]) == (2, "nothing compared")
    with_default = gate(old, new, 0.03, defaults=lambda op: {"layout": "row"} if op == "rmsnorm_fwd" else {})
    assert (with_default.exit_code, with_default.compared) == (0, 1)
    assert gate(new, old, 0.03, defaults=lambda _op: {"layout": "row"}).reason == "1 missing"


def test_gate_one_row_of_another_gpu_is_left_out_with_a_note() -> None:
    elsewhere = record(device="NVIDIA B200", quant="none")
    for old, new, side in (([record()], [record(), elsewhere], "new"), ([record(), elsewhere], [record()], "baseline")):
        answer = gate(old, new, 0.03)
        assert (answer.exit_code, answer.notes) == (0, (f"rows that only {side} has, left out: 1 of NVIDIA B200 cold",))
    slower = gate([record()], [record(150.0), elsewhere], 0.03)
    assert slower.exit_code == 1


def test_gate_of_row_measured_in_another_order_of_axes_compares_it() -> None:
    assert gate([record()], [record(150.0, axes={"N": 4096, "M": 8192})], 0.03).reason == "1 regression"


def test_gate_judges_the_newest_record_of_a_row() -> None:
    answer = gate([record(50.0), record()], [record(200.0), record(case="renamed")], 0.03)
    assert answer.exit_code == 0
    lines = [f"1 older row of {side} not judged, as newer rows have the same cases" for side in ("baseline", "new")]
    assert answer.notes == tuple(lines)


def test_gate_with_a_regression_and_an_ambiguous_row_exits_with_1() -> None:
    old = [record(), record(quant="none"), record(quant="fp8_t")]
    new = [record(103.5), record(110.0, quant="none"), record(90.0, quant="fp8_t")]
    answer = gate(old, new, 0.03)
    assert (answer.exit_code, answer.reason) == (1, "1 regression")


def test_gate_of_overlapping_intervals_or_equal_files_never_regresses() -> None:
    rng = random.Random(0)
    for _ in range(300):
        old = record(rng.uniform(2, 200), spread=rng.uniform(0, 1))
        new = record(rng.uniform(2, 200), spread=rng.uniform(0, 1))
        assert gate([old], [old], 0.0).exit_code in (0, 3)
        answer = gate([old], [new], 0.0)
        overlap = (new.ci_low_us or 0) <= (old.ci_high_us or 0)
        assert not (overlap and answer.exit_code == 1)


@pytest.mark.parametrize(
    ("old", "new", "verdict", "reason"),
    [
        (by_process(100, 0, 0.002, -0.002), by_process(100, 0, 0.002, -0.002), "pass", ""),
        (
            by_process(100, 0, 0.002, -0.002),
            by_process(106, 0, 0.002, -0.002),
            "regression",
            "at least 5.5% slower, tolerated 3.0%; 3 and 3 processes",
        ),
        (
            by_process(100, 0, 0.002, -0.002),
            by_process(102, 0, 0.002, -0.002),
            "slower",
            "within the tolerated 3.0%; 3 and 3 processes",
        ),
        (
            by_process(100, 0, 0.002, -0.002),
            by_process(103.5, 0, 0.003, -0.003),
            "ambiguous",
            "at least 2.9% slower, tolerated 3.0%: measure more; 3 and 3 processes",
        ),
        (
            by_process(100, 0, 0.002, -0.002),
            by_process(102.8, 0, 0.002, -0.002),
            "ambiguous",
            "up to +3.3%, tolerated 3.0%: measure more; 3 and 3 processes",
        ),
        (
            by_process(100, 0, 0.002, -0.002),
            by_process(100, 0, 0, 0.08),
            "ambiguous",
            "known to ±7.3% only: measure more; 3 and 3 processes",
        ),
        (by_process(100, 0, 0.002, -0.002), by_process(90, 0, 0.002, -0.002), "faster", "3 and 3 processes"),
        (
            by_process(100, 0.0),
            by_process(106, 0, 0.002, -0.002),
            "regression",
            "at least 4.9% slower, tolerated 3.0%; 1 and 3 processes",
        ),
        (
            by_process(100, 0.0),
            by_process(106, 0.0),
            "ambiguous",
            "at least 5.0% slower, tolerated 3.0%, a regression from 8.8% on: measure more processes; one process a side",
        ),
        (by_process(100, 0.0), by_process(110, 0.0), "regression", "at least 9.0% slower, tolerated 3.0%; one process a side"),
        (
            record(),
            by_process(106, 0, 0.002, -0.002),
            "ambiguous",
            "at least 5.0% slower, tolerated 3.0%, a regression from 8.8% on: measure more processes; one process a side",
        ),
        (
            record(ci_low_us=99.9, ci_high_us=100.1),
            record(102.5, ci_low_us=102.4, ci_high_us=102.6),
            "slower",
            "within the tolerated 3.0%; one process a side",
        ),
    ],
)
def test_gate_of_several_processes_judges_by_process(old: Record, new: Record, verdict: str, reason: str) -> None:
    (row,) = gate([old], [new], 0.03).rows
    assert (row.verdict, row.reason) == (verdict, reason)


@pytest.mark.parametrize("rows", [1, 3, 11])
def test_gate_of_few_rows_of_one_process_fails_in_at_most_one_of_a_hundred_runs(rows: int) -> None:
    """Gaussian noise of 2 % between processes, which narrow intervals of one process a side do not show."""
    rng = np.random.default_rng(rows)

    def side() -> list[Record]:
        times = 100 * np.exp(rng.normal(0, 0.02, rows))
        return [
            record(us, ci_low_us=0.997 * us, ci_high_us=1.003 * us, axes={"M": at + 1, "N": 64}) for at, us in enumerate(times)
        ]

    codes = [gate(side(), side(), 0.03).exit_code for _ in range(400)]
    assert codes.count(1) <= 4
    assert codes.count(0) > 4


@pytest.mark.parametrize("roles", [("own", "peer"), ("peer", "own"), ("", "own")])
def test_gate_row_that_is_a_peer_s_on_one_side_only_is_judged(roles: tuple[Role, Role]) -> None:
    old, new = (record(us, role=role) for us, role in zip((100.0, 150.0), roles, strict=True))
    assert gate([old], [new], 0.03).exit_code == 1


def test_gate_of_peers_alone_judges_nothing_and_does_not_pass() -> None:
    sides = [record(role="peer")], [record(150.0, role="peer")]
    answer = gate(*sides, 0.03)
    assert (answer.exit_code, answer.reason) == (2, "nothing judged: all compared rows are of peers, which --peers judges")
    assert gate(*sides, 0.03, peers=True).exit_code == 1


@pytest.mark.parametrize(
    ("floors", "records"),
    [((0.06, None), "baseline records"), ((0.01, 0.06), "new records"), ((0.06, 0.05), "baseline and new records")],
)
def test_gate_reason_of_a_slowdown_within_noise_names_the_records_to_measure(
    floors: tuple[float | None, float | None], records: str
) -> None:
    old = record(ci_low_us=100.0, ci_high_us=100.0, aa_floor=floors[0])
    new = record(104.0, ci_low_us=103.5, ci_high_us=104.5, aa_floor=floors[1])
    (row,) = gate([old], [new], 0.03).rows
    assert (row.verdict, row.reason) == (
        "ambiguous",
        "at least 3.5% slower, tolerated 3.0%, but within the noise floor of 6.0%: "
        f"measure {records} afresh on an idle GPU; one process a side",
    )


def test_gate_of_processes_far_apart_with_quiet_rounds_is_ambiguous() -> None:
    (row,) = gate([by_process(100, 0, 0.03, -0.03)], [by_process(106, 0, 0.03, -0.03)], 0.03).rows
    assert row.verdict == "ambiguous"
    assert row.change is not None
    assert row.change.low < 0 < row.change.high


def test_gate_of_single_samples_of_one_process_is_ambiguous() -> None:
    """Their intervals have no width, and two processes with the same code may differ by 5.7 %."""
    old, new = (
        record(us, spread=0.0, n=1, samples_us=[[us]], date=f"2026-11-2{day}T06:00:00Z") for us, day in ((100, 1), (105, 2))
    )
    assert gate([old], [new], 0.03).rows[0].verdict == "ambiguous"
    assert gate([old], [old], 0.03).rows[0].verdict == "pass"


def test_gate_of_one_slow_row_among_many_is_ambiguous() -> None:
    old, new = by_process(100, 0, 0.006, -0.006), by_process(106, 0, 0.006, -0.006)
    (alone,) = gate([old], [new], 0.03).rows
    others = [by_process(100, 0, 0.006, -0.006, quant=f"q{i}") for i in range(999)]
    among = gate([old, *others], [new, *others], 0.03).rows[0]
    assert (alone.verdict, among.verdict) == ("regression", "ambiguous")
    assert "% slower, tolerated 3.0%, perhaps by chance: measure more" in among.reason
    assert alone.change is not None
    assert among.change is not None
    assert among.change.p == pytest.approx(1000 * alone.change.p)
    assert (alone.change.low, alone.change.high) == (among.change.low, among.change.high)


def test_confirm_measures_suspects_again_and_pools_them() -> None:
    old = [by_process(100, 0, 0.002, -0.002), by_process(100, 0, 0.002, -0.002, quant="none")]
    odd = [by_process(100, 0, 0, 0.045), by_process(100, 0, 0.001, -0.001, quant="none")]
    asked: list[Any] = []

    def remeasure(suspects: Any) -> list[Record]:
        asked.append(suspects)
        return [by_process(100, 0, 0.002, 0.001), by_process(300, 0, 0, 0, quant="none")]

    verdict, pooled = confirm(partial(gate, old, margin=0.03), odd, remeasure)
    assert asked == [frozenset({odd[0].key})]
    assert [(row.verdict, row.reason) for row in verdict.rows] == [("pass", ""), ("pass", "")]
    assert [len(row.samples_us or ()) for row in pooled] == [6, 3]
    assert verdict.exit_code == 0


def test_confirm_of_a_slow_row_fails_and_without_a_suspect_measures_nothing() -> None:
    old, slow = by_process(100, 0, 0.002, -0.002), by_process(106, 0, 0.002, -0.002)
    verdict, _pooled = confirm(partial(gate, [old], margin=0.03), [slow], lambda _suspects: [slow])
    assert verdict.exit_code == 1
    assert verdict.rows[0].reason.endswith("; 3 and 6 processes")

    def never(_suspects: Any) -> list[Record]:
        raise AssertionError("nothing is suspect")

    assert confirm(partial(gate, [old], margin=0.03), [old], never) == (gate([old], [old], 0.03), [old])
    gone, _pooled = confirm(partial(gate, [old], margin=0.03), [slow], lambda _suspects: [])
    assert gone.exit_code == 1
    assert gone.rows[0].reason.endswith("; 3 and 3 processes")


def test_confirm_measures_rows_that_stay_ambiguous_twice_and_regressions_once() -> None:
    old = [by_process(100, 0, 0.002, -0.002), by_process(100, 0, 0.002, -0.002, quant="none")]
    odd = [by_process(105, 0, 0, -0.048), by_process(105, 0, 0.001, -0.001, quant="none")]
    clean = [by_process(105, 0, 0.001, -0.001), by_process(105, 0, 0.001, -0.001, quant="none")]
    asked: list[Any] = []

    def remeasure(suspects: Any) -> list[Record]:
        asked.append(suspects)
        return odd if len(asked) == 1 else clean

    verdict, pooled = confirm(partial(gate, old, margin=0.03), odd, remeasure)
    rows = [record.key for record in old]
    assert asked == [frozenset(rows), frozenset(rows[:1])]
    assert [row.verdict for row in verdict.rows] == ["ambiguous", "regression"]
    assert verdict.rows[0].reason.endswith("; 3 and 9 processes")
    assert verdict.rows[1].reason.endswith("; 3 and 6 processes")
    assert [len(row.samples_us or ()) for row in pooled] == [9, 6]
    asked.clear()
    assert confirm(partial(gate, old, margin=0.03), odd, remeasure, reruns=0)[1] == odd
    assert not asked


def test_gate_of_a_slowdown_perhaps_below_half_a_microsecond_is_ambiguous() -> None:
    old = by_process(6, 0, 0.002, -0.002)
    verdicts = [gate([old], [by_process(6 * (1 + part), 0, 0.002, -0.002)], 0.03).rows[0] for part in (0.06, 0.08, 0.09)]
    assert [row.verdict for row in verdicts] == ["slower", "ambiguous", "regression"]
    assert verdicts[1].reason == (
        "at least 7.5% slower, tolerated 3.0%; 0.48 µs, up to 0.51, tolerated 0.5: measure more; 3 and 3 processes"
    )


def test_gate_reason_of_a_slower_row_names_other_facts_that_changed() -> None:
    (row,) = gate([record()], [record(110.0, driver="580", triton="3.6")], 0.03).rows
    assert row.reason == "at least 9.0% slower, tolerated 3.0%; driver 570 → 580; triton 3.5 → 3.6; one process a side"
    assert gate([record()], [record(driver="580")], 0.03).rows[0].reason == ""


def test_gate_of_two_units_of_one_gpu_model_has_a_note() -> None:
    old = [record(unit="a"), record(quant="none", unit="a")]
    note = "another NVIDIA H200: rows may differ by up to about 5.5 %"
    there = [record(unit="b"), record(quant="none", unit="b")]
    assert (gate(old, there, 0.03).notes, gate(old, there, 0.03).exit_code) == ((note,), 0)
    slower = gate(old, [record(110.0, unit="b"), there[1]], 0.03)
    assert (slower.notes, slower.exit_code) == ((note,), 1)
    assert gate(old, [record(unit="b"), old[1]], 0.03).notes == (note.replace("rows", "1 of 2 rows"),)
    for same in (old, [record(), record(quant="none")]):
        assert gate(old, same, 0.03).notes == gate(same, old, 0.03).notes == ()
    assert gate([record(unit="a")], [record(unit="b", device="NVIDIA H100")], 0.03).notes == ()
    _verdict, pooled = confirm(
        partial(gate, [by_process(100, 0, unit="a")], margin=0.03), [by_process(100, 0, unit="b")], lambda _: []
    )
    assert _verdict.notes == (note,)
    assert pooled[0].unit == "b"


def test_gate_of_3000_rows_keeps_to_its_time_and_memory() -> None:
    """Per row: 60 µs and 2.5 kB would be 6 s and 250 MB for 100,000 rows; bounds leave room for a busy machine."""
    old = [by_process(100.0, 0, 0.002, -0.002, axes={"M": n, "N": 4096}) for n in range(1, 3001)]
    new = [replace(row, date="2026-11-22T06:00:00Z") for row in old]

    def seconds() -> float:
        started = time.process_time()
        answer = gate(old, new, 0.03)
        assert (answer.exit_code, answer.compared) == (0, 3000)
        return time.process_time() - started

    assert min(seconds() for _ in range(3)) < 3.0


def test_shifts_of_many_rows_equal_shift_of_each() -> None:
    rng = np.random.default_rng(0)
    sides = [
        ([rng.normal(100, 1, n) for n in lengths], [rng.normal(101, 1, n) for n in lengths[::-1]])
        for lengths in [(5, 5, 5), (4, 6), (5, 5, 5), (7,), (5, 5, 5)]
    ]
    together = shifts(sides)
    assert together[3] is None
    for (old, new), shift_of_row in zip(sides, together, strict=True):
        (alone,) = shifts([(old, new)])
        assert (alone is None) == (shift_of_row is None)
        if alone is not None and shift_of_row is not None:
            assert (shift_of_row.log, shift_of_row.error, shift_of_row.freedom) == pytest.approx(
                (alone.log, alone.error, alone.freedom)
            )


def test_gate_reason_of_an_ambiguous_row_has_both_ends_of_its_change() -> None:
    answer = gate([record(100, 6.0)], [record(104, 6.0)], 0.03)
    (row,) = answer.rows
    assert row.verdict == "ambiguous"
    assert row.reason.startswith("7.5% faster to 17.0% slower, tolerated 3.0%: measure more")
