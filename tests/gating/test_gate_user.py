"""Test the gate in CI, on the command line: shipped records of a commit against altered copies of another commit."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import refused, run

RESULTS = Path(__file__).parents[2] / "results" / "nvidia_h200"
TIMES = ("time_us", "ci_low_us", "ci_high_us", "p10_us", "p90_us")
Rows = list[dict[str, Any]]


def rows_of(family: str) -> Rows:
    return [json.loads(line) for line in (RESULTS / f"{family}.jsonl").read_text().splitlines()]


def measured_again(rows: Rows, slowdown: Callable[[dict[str, Any]], float] = lambda _row: 0.0) -> Rows:
    """Return the rows as another commit measures them: with noise of 0.3 % and a slowdown."""
    noise = random.Random(0)
    again = []
    for row in rows:
        factor = (1 + slowdown(row)) * (1 + noise.gauss(0, 0.003))
        timed = {name: row[name] * factor for name in TIMES if row.get(name)}
        samples = [[us * factor for us in process] for process in row["samples_us"]]
        again.append({**row, **timed, "samples_us": samples, "date": "2026-11-26T09:00:00+00:00", "commit": "b" * 40})
    return again


BASE = rows_of("fp8_rowwise")
NEW = measured_again(BASE)
SHORTEST = min((row for row in BASE if row["role"] == "own"), key=lambda row: row["time_us"])


def is_ours(row: dict[str, Any]) -> bool:
    return bool(row["variant"] == "optimized")


ALL = f"({len(BASE)} rows compared, 0 faster)"
OURS = sum(map(is_ours, BASE))
NO_SLOWER = f"pass: no row is slower {ALL}"
SHAPE = " ".join(str(size) for size in SHORTEST["axes"].values())
OLDER = [{name: value for name, value in row.items() if name not in ("samples_us", "unit", "role", "flops")} for row in BASE]


@pytest.mark.parametrize(
    ("base", "new", "code", "last", "says"),
    [
        pytest.param(BASE, NEW, 0, NO_SLOWER, "", id="the same"),
        pytest.param(
            BASE, measured_again(BASE, lambda _row: 0.02), 1, f"fail: 2 variants slower as a whole {ALL}",
            f"failed: fp8_rowwise_2d optimized on NVIDIA H200, cold: slower by 2.0% in the geometric mean of {OURS} rows",
            id="2 % on all",
        ),
        pytest.param(
            BASE, measured_again(BASE, lambda row: 0.09 * (row == SHORTEST)), 0, f"pass: 1 slower, tolerated {ALL}",
            " µs: below 0.5 µs nothing is judged, ", id="9 % of a short row",
        ),
        pytest.param(
            BASE, measured_again(BASE, lambda row: 0.4 * (row == SHORTEST)), 1, f"fail: 1 regression {ALL}",
            f"{SHAPE} optimized", id="40 % of a row",
        ),
        pytest.param(
            BASE, [row for row in NEW if not is_ours(row)], 1,
            f"fail: {OURS} missing ({len(BASE) - OURS} rows compared, 0 faster)", f"{SHAPE} optimized not in the new records",
            id="removed",
        ),
        pytest.param(
            BASE[:60], NEW, 0, "pass: no row is slower (60 rows compared, 0 faster)",
            "note: rows that the baseline lacks, not judged: ", id="added",
        ),
        pytest.param(
            BASE, [row | {"variant": "fast"} if is_ours(row) else row for row in NEW], 1,
            f"fail: {OURS} missing ({len(BASE) - OURS} rows compared, 0 faster)", f"not judged: {OURS} of fp8_rowwise_2d fast",
            id="a variant renamed",
        ),
        pytest.param(BASE, [row | {"case": f"new-{row['case']}"} for row in NEW], 0, NO_SLOWER, "", id="cases renamed"),
        pytest.param(
            BASE, [row | {"op": "other"} for row in NEW], 2,
            "not usable: nothing compared: no row of the baseline is timed in the new records", "of other optimized",
            id="an operator renamed",
        ),
        pytest.param(BASE + rows_of("fp8_swiglu"), NEW, 1, f"missing {ALL}", "missing fp8_swiglu_2d", id="a family removed"),
        pytest.param(
            BASE, [row | {"device": "NVIDIA H100"} for row in NEW], 2,
            "not usable: not comparable: baseline has device NVIDIA H200, new has NVIDIA H100", "", id="another GPU",
        ),
        pytest.param(OLDER, NEW, 0, NO_SLOWER, "", id="records of an older version"),
    ],
)  # fmt: skip
def test_gate_of_altered_records_exits_with_its_documented_code(
    base: Rows, new: Rows, code: int, last: str, says: str, tmp_path: Path
) -> None:
    for name, rows in (("base", base), ("new", new)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run("gate", tmp_path / "base.jsonl", tmp_path / "new.jsonl", "--allow-stale")
    text = " ".join(result.stdout.split())
    assert (result.exit_code, text[-len(last) :]) == (code, last)
    assert says in text


LINES = [json.dumps(row) + "\n" for row in NEW[:4]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no records"),
        ("".join(LINES)[:-9], "4: JSON: truncated, the last line has no end"),
        (LINES[0] + LINES[1][:60] + "\n" + LINES[2], "2: JSON: input data was truncated"),
        (LINES[0] + "\n" + LINES[1], "2: JSON: '': expected a record, a JSON object, on each line"),
        ("<<<<<<< HEAD\n" + LINES[0], "1: JSON: '<<<<<<< HEAD': expected a record, a JSON object, on each line"),
        (json.dumps(NEW[0] | {"energy_j": 3}) + "\n", "1: energy_j: 3: expected no field of this name"),
        (json.dumps(NEW[0] | {"time_us": -3}) + "\n", "1: time_us: -3: expected float >= 0.0"),
        ("".join(LINES + LINES[:1]), "on NVIDIA H200: the row of line 1 again; delete one of the two lines"),
    ],
)
def test_gate_of_a_damaged_file_names_file_line_and_field(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    path.write_text(text)
    assert refused("gate", RESULTS / "fp8_rowwise.jsonl", path, "--allow-stale").startswith(f"error: {path}:")
    assert refused("gate", path, RESULTS / "fp8_rowwise.jsonl", "--allow-stale").endswith(message)
