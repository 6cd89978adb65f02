"""The table of training steps, from records."""

import csv
import io
import re
from pathlib import Path

import pytest
from command_line import record, run
from literal_records import NO_TIMES, changed

from kerneltune import records
from kerneltune.table import Table, join_tables
from kerneltune.workloads.training_table import tables

STEP = {"op": "moe_step", "case": "some-4096", "axes": {"M": 4096, "K": 64, "N": 64, "E": 2}, "family": "moe_training"}
TIMES = {"baseline": 1000.0, "torchao_rowwise": 1200.0, "tensorwise": 500.0, "tensorwise_gemms": 300.0, "tensorwise_casts": 150.0,
         "tensorwise_cached": 400.0, "tensorwise_refresh": 80.0, "tensorwise_compiled": 444.0, "rowwise": 625.0}  # fmt: skip
ROLES = {"torchao_rowwise": "peer"} | dict.fromkeys(
    ("tensorwise_gemms", "tensorwise_casts", "tensorwise_cached", "tensorwise_refresh"), "part"
)
RECORDS = [
    record(us, variant=variant, role=ROLES.get(variant, "own"), options={"groups": "zipf"}, **STEP | {"pct_ceiling": 1e4 / us})
    for variant, us in TIMES.items()
]


def values(table: Table, *names: str) -> list[tuple[object, ...]]:
    """Return the values of some columns, by their names in CSV, a tuple per row."""
    places = [[column.csv_name for column in table.columns].index(name) for name in names]
    return [tuple(row.values[column] for column in places) for row in table.rows]


def test_training_table_prints_a_rest_of_0_without_a_sign() -> None:
    whole = [changed(r, time_us=449.7 if r.variant == "tensorwise" else r.time_us) for r in RECORDS]
    (line,) = (line for line in tables(whole)[0].markdown().splitlines() if "| tensorwise |" in line)
    assert "| 300 | 0 |" in line


def test_training_table_rows_have_times_and_ratios_of_records() -> None:
    (table,) = tables(RECORDS)
    assert values(table, "bf16_us", "torchao_us", "step_us", "products_us")[0] == (1000, 1200, 500, 300)
    names = ("step_us", "bound_us", "cached_us", "other_us")
    assert values(table, *names) == [(500, 300 + 500 * 20 / 100, 400 + 80 / 8, 50), (625, None, None, None)]


def test_training_table_text_fits_80_columns() -> None:
    (table,) = tables(RECORDS)
    lines = table.text(80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[:2] == [
        "tensorwise: 2.00x bf16 (1 case), 2.40x torchao (1 case)",
        "rowwise: 1.60x bf16 (1 case), 1.92x torchao (1 case)",
    ]
    assert [line.split() for line in lines if line.startswith(("some", " " * 9))][:2] == [
        ["some-4096", "tensorwise", "1000", "1200", "500", "2.00x", "2.40x", "80.0"],
        ["rowwise", "1000", "1200", "625", "1.60x", "1.92x"],
    ]
    assert "cached µs" in " ".join(lines[: lines.index("")])
    assert "all rows: groups zipf" in lines


def test_training_table_csv_has_every_column() -> None:
    lines = list(csv.DictReader(io.StringIO(tables(RECORDS)[0].csv())))
    assert {name: lines[0][name] for name in ("step_us", "bound_us", "pct_bound", "cached_us", "other_us", "compiled_us")} == {
        "step_us": "500.0", "bound_us": "400.0", "pct_bound": "80.0", "cached_us": "410.0", "other_us": "50.0",
        "compiled_us": "444.0",
    }  # fmt: skip


@pytest.mark.parametrize("style", ["text", "markdown", "csv"])
def test_model_steps_of_two_gpus_say_which_row_is_of_which(style: str, tmp_path: Path) -> None:
    step = STEP | {"op": "model_step", "axes": {"T": 8192}, "family": "model_training"}
    rows = [record(us, device=gpu, policy="eager", **step) for gpu, us in (("NVIDIA H100", 2e6), ("NVIDIA H200", 1e6))]
    records.append(tmp_path / "a.jsonl", rows)
    printed = run("compare", "--from", tmp_path / "a.jsonl", "--format", style).stdout.splitlines()
    assert [[gpu for gpu in ("H100", "H200") if gpu in line] for line in printed if "some-4096" in line] == [["H100"], ["H200"]]


def test_training_tables_are_one_per_policy_and_device() -> None:
    slower = [changed(r, policy="eager", time_us=(r.time_us or 0) * (1 if r.variant == "baseline" else 3)) for r in RECORDS]
    cold, eager = tables([*RECORDS, *slower])
    assert (cold.title, eager.title) == ("cold, NVIDIA H200", "eager, NVIDIA H200")
    assert cold.head[0].startswith("tensorwise: 2.00x bf16 (1 case)")
    assert eager.head[0].startswith("tensorwise: 0.67x bf16")
    assert len(tables([*RECORDS, *(changed(r, device="NVIDIA B200") for r in RECORDS)])) == 2
    assert tables([record()]) == []


def test_report_page_shows_whole_steps_only(tmp_path: Path) -> None:
    records.append(tmp_path / "moe.jsonl", RECORDS)
    assert run("report", tmp_path / "moe.jsonl", "--results", tmp_path, "-o", tmp_path / "page.html").exit_code == 0
    text = (tmp_path / "page.html").read_text()
    parts = ["tensorwise_gemms", "tensorwise_casts", "tensorwise_cached", "tensorwise_refresh"]
    assert [name for name in TIMES if f'"{name}"' not in text] == parts


def test_training_table_names_the_commit_of_a_peer_of_another_run() -> None:
    mixed = [changed(r, commit="f00d") if r.variant == "torchao_rowwise" else r for r in RECORDS]
    (table,) = tables(mixed)
    assert table.rows[0].values[-1] == "f00d"
    assert "f00d" in table.markdown()


def test_training_table_has_no_ratio_of_times_of_different_runs() -> None:
    later = [changed(r, unit="b" if r.variant in ("baseline", "rowwise") else "a") for r in RECORDS]
    ratios = values(tables(later)[0], "times_bf16", "cached_times_bf16", "times_torchao")
    assert ratios == [(None, None, 2.4), (1.6, None, None)]
    assert values(tables(later)[0], "bf16_us", "cached_us", "bound_us")[0] == (1000, 410, 400)
    apart = [changed(r, commit="f00d") if r.variant in ("tensorwise_gemms", "tensorwise_refresh") else r for r in RECORDS]
    assert values(tables(apart)[0], "bound_us", "cached_us")[0] == (None, None)


def test_compare_of_training_records_prints_the_training_table(tmp_path: Path) -> None:
    file = tmp_path / "moe_training.jsonl"
    records.append(file, RECORDS)
    result = run("compare", "--from", file)
    assert result.exit_code == 0
    text = join_tables(tables(RECORDS)[:1], "text", 100)
    assert result.stdout == text.replace("all rows: groups", "all rows: device NVIDIA H200, groups")
    output = tmp_path / "table.md"
    assert run("compare", file, "--format", "markdown", "--output", output).exit_code == 0
    assert re.sub(r"^\| (device|---|NVIDIA H200) ", "", output.read_text(), flags=re.M) == tables(RECORDS)[0].markdown()
    assert run("compare", "baseline", "tensorwise", "--from", file).stdout.startswith("A: baseline; B: tensorwise")


def test_steps_of_models_have_tokens_per_second_and_ratios_within_a_run() -> None:
    steps = {"op": "model_step", "case": "some", "axes": {"T": 4096}, "family": "model_training", "options": {"compiled": True}}
    times = {"baseline": 2000.0, "torchao": 1600.0, "tensorwise": 1000.0, "tensorwise_dense": 800.0}
    rows = [record(us, variant=variant, **steps) for variant, us in times.items()]
    failed = record(1.0, variant="rowwise", **steps | NO_TIMES | {"status": "failed", "reason": "wrong"})
    (table,) = tables([*rows, failed])
    assert values(table, "variant", "layers", "step_ms", "tokens_per_s", "times_bf16", "times_torchao") == [
        ("bf16", "compiled", 2.0, 2_048_000.0, 1.0, 0.8),
        ("torchao", "compiled", 1.6, 2_560_000.0, 1.25, 1.0),
        ("tensorwise", "compiled", 1.0, 4_096_000.0, 2.0, 1.6),
        ("tensorwise_dense", "compiled", 0.8, 5_120_000.0, 2.5, None),
        ("rowwise", "compiled", None, None, None, None),
    ]
    assert table.rows[-1].note == "wrong"
