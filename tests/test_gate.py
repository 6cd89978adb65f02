"""The gate: each outcome and exit code on literal records, and its exact text."""

import random
from typing import Any

import pytest

from kerneltune.gate import gate, gate_markdown, gate_text
from kerneltune.records import Record

NO_TIMES = dict.fromkeys(["time_us", "gbps", "ci_low_us", "ci_high_us", "n"])
LABEL = "rmsnorm_fwd M=8192 N=4096 bfloat16 fp8 cold"


def record(us: float = 100.0, spread: float = 0.5, **changes: Any) -> Record:
    """A record whose interval is `us` ± `spread`."""
    values: dict[str, Any] = {
        "op": "rmsnorm_fwd",
        "variant": "optimized",
        "case": "te-8192x4096",
        "dtype": "bfloat16",
        "quant": "fp8",
        "policy": "cold",
        "status": "passed",
        "time_us": us,
        "gbps": 1000.0,
        "ci_low_us": us - spread,
        "ci_high_us": us + spread,
        "n": 10,
        "device": "NVIDIA H200",
        "driver": "570",
        "torch": "2.9",
        "triton": "3.5",
        "source_hash": "0",
        "commit": "0",
        "date": "2026-11-21T06:00:00Z",
        "axes": {"M": 8192, "N": 4096},
    }
    return Record(**{**values, **changes})


def untimed(status: str, reason: str = "y: values\ndiffer", **changes: Any) -> Record:
    return record(**{**NO_TIMES, "status": status, "reason": reason, **changes})


@pytest.mark.parametrize(
    ("old", "new", "verdict", "code"),
    [
        (record(), record(), "pass", 0),
        (record(), record(102.9), "pass", 0),
        (record(), record(110.0), "regression", 1),
        (record(), record(103.5), "ambiguous", 3),
        (record(), record(110.0, spread=9.0), "ambiguous", 3),
        (record(), record(90.0), "faster", 0),
        (record(), record(96.5), "pass", 0),
        (record(), record(110.0, aa_floor=0.2), "pass", 0),
        (record(aa_floor=0.09), record(110.0), "ambiguous", 3),
        (record(4.0, spread=0.01), record(4.49, spread=0.01), "pass", 0),
        (record(4.0, spread=0.01), record(4.51, spread=0.01), "regression", 1),
        (record(4.0, spread=0.01), record(3.51, spread=0.01), "pass", 0),
    ],
)
def test_verdicts(old: Record, new: Record, verdict: str, code: int) -> None:
    answer = gate([old], [new], 0.03)
    assert [row.verdict for row in answer.rows] == [verdict]
    assert answer.exit_code == code


def test_bounds_are_the_conservative_ones() -> None:
    (row,) = gate([record(spread=1.0)], [record(110.0, spread=2.0)], 0.03).rows
    assert row.slowdown == pytest.approx(0.10)
    assert row.low == pytest.approx(108 / 101 - 1)
    assert row.high == pytest.approx(112 / 99 - 1)


def test_a_row_that_is_gone_or_untimed_or_failed_is_a_regression() -> None:
    kept = record(quant="none")
    missing = gate([record(), kept], [kept], 0.03)
    assert [(row.verdict, row.reason) for row in missing.rows] == [("missing", "not in the new records"), ("pass", "")]
    assert (missing.exit_code, missing.reason) == (1, "1 missing")
    skipped = gate([record(), kept], [kept, untimed("skipped", "liger is not installed")], 0.03)
    assert skipped.rows[0].reason == "skipped in the new records: liger is not installed"
    assert skipped.exit_code == 1
    unchecked = gate([record(), kept], [kept, untimed("checked", "")], 0.03)
    assert unchecked.rows[0].reason == "checked in the new records: not timed"
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
            [record(), untimed("checked", "", device="interpreter")],
            "new holds records of the interpreter, whose times mean nothing",
        ),
    ],
)
def test_what_cannot_be_compared(old: list[Record], new: list[Record], reason: str) -> None:
    answer = gate(old, new, 0.03)
    assert (answer.exit_code, answer.reason) == (2, reason)


@pytest.mark.parametrize("margin", [-0.1, float("nan"), float("inf")])
def test_a_bad_margin(margin: float) -> None:
    with pytest.raises(ValueError, match=f"^margin: {margin!r}: expected a finite fraction of 0 or more$"):
        gate([record()], [record()], margin)


def test_the_newest_record_of_a_row_counts() -> None:
    assert gate([record(50.0), record()], [record(200.0), record(case="renamed")], 0.03).exit_code == 0


def test_a_regression_outranks_an_ambiguous_row() -> None:
    old = [record(), record(quant="none"), record(quant="fp8_t")]
    new = [record(103.5), record(110.0, quant="none"), record(90.0, quant="fp8_t")]
    answer = gate(old, new, 0.03)
    assert (answer.exit_code, answer.reason) == (1, "1 regression")
    assert gate_text(answer) == (
        "regression  rmsnorm_fwd M=8192 N=4096 bfloat16 none cold  optimized  +10.0% [+9.0%, +11.1%]"
        "  (at least +9.0%, tolerated 3.0%)\n"
        f"ambiguous   {LABEL}  optimized  +3.5% [+2.5%, +4.5%]  (at least +2.5%, tolerated 3.0%: measure more)\n"
        "faster      rmsnorm_fwd M=8192 N=4096 bfloat16 fp8_t cold  optimized  -10.0% [-10.9%, -9.0%]\n"
        "gate: regression: 1 regression (3 rows compared, 1 faster)\n"
    )
    assert gate_markdown(answer) == (
        "**gate: regression: 1 regression (3 rows compared, 1 faster)**\n"
        "\n"
        "| verdict | row | case | variant | slowdown | reason |\n"
        "|---|---|---|---|---:|---|\n"
        "| regression | rmsnorm_fwd M=8192 N=4096 bfloat16 none cold | te-8192x4096 | optimized | +10.0% [+9.0%, +11.1%] "
        "| at least +9.0%, tolerated 3.0% |\n"
        f"| ambiguous | {LABEL} | te-8192x4096 | optimized | +3.5% [+2.5%, +4.5%] "
        "| at least +2.5%, tolerated 3.0%: measure more |\n"
        "| faster | rmsnorm_fwd M=8192 N=4096 bfloat16 fp8_t cold | te-8192x4096 | optimized | -10.0% [-10.9%, -9.0%] |  |\n"
    )


def test_text_of_a_pass_a_missing_row_and_nothing() -> None:
    assert gate_text(gate([record()], [record()], 0.03)) == "gate: pass: no row is slower (1 row compared, 0 faster)\n"
    assert gate_markdown(gate([record()], [record()], 0.03)) == "**gate: pass: no row is slower (1 row compared, 0 faster)**\n"
    kept = record(quant="none")
    assert gate_text(gate([record(), kept], [kept], 0.03)) == (
        f"missing     {LABEL}  optimized  (not in the new records)\ngate: regression: 1 missing (1 row compared, 0 faster)\n"
    )
    assert gate_text(gate([record()], [], 0.03)) == (
        "gate: not usable: nothing compared: new has no records (0 rows compared, 0 faster)\n"
    )


def test_overlapping_intervals_never_regress_and_a_file_never_regresses_against_itself() -> None:
    rng = random.Random(0)
    for _ in range(300):
        old = record(rng.uniform(2, 200), spread=rng.uniform(0, 1))
        new = record(rng.uniform(2, 200), spread=rng.uniform(0, 1))
        assert gate([old], [old], 0.0).exit_code == 0
        answer = gate([old], [new], 0.0)
        overlap = (new.ci_low_us or 0) <= (old.ci_high_us or 0)
        assert not (overlap and answer.exit_code == 1)
