"""Int4 products beside 8 and 16 bits: the tables, from records."""

from pathlib import Path

from command_line import record, run
from literal_records import NO_TIMES, changed

from kerneltune import records
from kerneltune.records import Record
from kerneltune.workloads import own_tables
from kerneltune.workloads.int4_table import tables

INT4 = {
    64: {"optimized": 20.0, "scaled_mm": 19.0, "dequantised": 25.0, "humming": 25.0},
    16: {"optimized": 10.0, "baseline": 5.0, "scaled_mm": 15.0, "dequantised": 22.0, "humming": 14.0, "tinygemm": 40.0},
    128: {"optimized": 40.0, "scaled_mm": 30.0, "dequantised": 45.0},
}
FASTEST = {
    16: {"baseline": 10.0, "int4_fp8": 12.0, "scaled_mm_rowwise": 20.0, "scaled_mm_static": 15.0, "optimized": 10.0},
    64: {"baseline": 20.0, "int4_fp8": 16.0, "scaled_mm_rowwise": 24.0, "scaled_mm_static": 12.0, "optimized": 16.0},
    128: {"baseline": 40.0, "int4_fp8": 30.0, "scaled_mm_rowwise": 24.0, "scaled_mm_static": 15.0, "optimized": 24.0},
}
CHOSEN = {16: "int4_gemm", 64: "int4_fp8_gemm", 128: "fp8"}


def _int4(variant: str, tokens: int, time_us: float) -> Record:
    axes, options = {"N": tokens, "M": 128, "K": 256}, {"group": 64, "zeros": False}
    return record(time_us, op="int4_gemm", variant=variant, dtype="float16", axes=axes, options=options)


def _fastest(variant: str, tokens: int, time_us: float, rows: int = 128) -> Record:
    axes, options = {"N": tokens, "M": rows, "K": 256}, {"group": 128, "zeros": False, "fp8_copy": True}
    row = record(time_us, op="int4_fastest_gemm", variant=variant, dtype="bfloat16", axes=axes, options=options)
    return changed(row, config={"product": CHOSEN[tokens]} if variant == "optimized" else None)


OF_INT4 = [_int4(variant, tokens, us) for tokens, times in INT4.items() for variant, us in times.items()]
OF_FASTEST = [_fastest(variant, tokens, us) for tokens, times in FASTEST.items() for variant, us in times.items()]


def test_int4_table_row_has_the_fastest_of_each_kind_and_ratios_to_ours() -> None:
    (table,) = tables(OF_INT4)
    layer = "M=128 K=256 float16 group=64"
    assert [row.values for row in table.rows] == [
        (layer, 16, 10.0, 15.0, 22.0, 14.0, 1.4, 1.5, 2.2),
        (layer, 64, 20.0, 19.0, 25.0, 25.0, 1.25, 0.95, 1.25),
        (layer, 128, 40.0, 30.0, 45.0, None, None, 0.75, 1.125),
    ]
    assert (
        table.head[0]
        == "n = 16: 1.40x peer (worst 1.40x, 1 cases), 1.50x fp8 (worst 1.50x, 1 cases), 2.20x 16 bit (worst 2.20x, 1 cases)"
    )
    assert table.foot[0] == f"{layer}: int4 from n=16, fp8 from n=64"
    assert max(map(len, table.text(80).splitlines())) <= 80


def test_int4_table_of_the_chosen_product_names_it_and_the_fastest() -> None:
    (table,) = tables(list(reversed(OF_FASTEST)))
    layer = "M=128 K=256 bfloat16 group=128"
    assert [row.values for row in table.rows] == [
        (layer, 16, 10.0, 12.0, 20.0, 15.0, None, 10.0, "int4_gemm", 2.0, 1.5),
        (layer, 64, 20.0, 16.0, 24.0, 12.0, None, 16.0, "int4_fp8_gemm", 1.5, 0.75),
        (layer, 128, 40.0, 30.0, 24.0, 15.0, None, 24.0, "fp8", 1.0, 15 / 24),
    ]
    assert table.foot[0] == f"{layer}: int4_gemm from n=16, int4_fp8_gemm from n=64, fp8 row from n=128"


def test_int4_table_head_has_geometric_means_over_layers() -> None:
    second = [_fastest(variant, 128, us, rows=256) for variant, us in {**FASTEST[128], "scaled_mm_rowwise": 96.0}.items()]
    (table,) = tables([*OF_FASTEST, *second, _fastest("scaled_mm_rowwise", 128, 1.0, rows=512)])
    assert table.head[-2] == "n = 128: 2.00x fp8 row (worst 1.00x, 2 cases), 0.62x fp8 tensor (worst 0.62x, 2 cases)"


def test_int4_table_uses_the_last_record_and_no_failed_record() -> None:
    failed = changed(_fastest("baseline", 16, 5.0), status="failed", reason="wrong", **NO_TIMES)
    (table,) = tables([*OF_FASTEST, failed, _fastest("baseline", 16, 9.0)])
    assert table.rows[0].values[2] == 9.0
    assert tables([failed]) == []
    assert tables([_fastest("baseline", 16, 9.0)]) == []  # nothing to compare with


def test_int4_tables_of_several_operators_are_one_each() -> None:
    assert [table.title.split(",")[0] for table in own_tables([*OF_INT4, *OF_FASTEST])] == ["int4_gemm", "int4_fastest_gemm"]


def test_compare_of_int4_records_prints_the_int4_table(tmp_path: Path) -> None:
    file = tmp_path / "weight_only.jsonl"
    records.append(file, OF_INT4)
    assert run("compare", file).stdout.replace("all rows: device NVIDIA H200\n", "") == tables(OF_INT4)[0].text(100)
    other = tmp_path / "other.jsonl"
    records.append(other, [*OF_INT4, record(), record(50.0, variant="optimized")])  # of an operator without a table of its own
    assert run("compare", other, "--op", "rmsnorm_fwd").stdout.startswith("A: baseline; B: optimized")
