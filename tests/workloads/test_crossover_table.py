"""The fastest product with int4 weights by tokens: the table, from records."""

from command_line import NO_TIMES, record
from literal_records import changed

from kerneltune.records import Record
from kerneltune.workloads import own_tables
from kerneltune.workloads.crossover_table import tables

TIMES = {
    16: {"baseline": 10.0, "int4_fp8": 12.0, "scaled_mm_rowwise": 20.0, "scaled_mm_static": 15.0, "optimized": 10.0},
    64: {"baseline": 20.0, "int4_fp8": 16.0, "scaled_mm_rowwise": 24.0, "scaled_mm_static": 16.0, "optimized": 16.0},
    128: {"baseline": 40.0, "int4_fp8": 30.0, "scaled_mm_rowwise": 24.0, "scaled_mm_static": 15.0, "optimized": 24.0},
}
CHOSEN = {16: "int4_gemm", 64: "int4_fp8_gemm", 128: "fp8"}


def _record(variant: str, tokens: int, time_us: float, rows: int = 128) -> Record:
    axes, options = {"N": tokens, "M": rows, "K": 256}, {"group": 128, "zeros": False, "fp8_copy": True}
    made = record(time_us, op="int4_fastest_gemm", variant=variant, dtype="bfloat16", axes=axes, options=options)
    return changed(made, config={"product": CHOSEN[tokens]} if variant == "optimized" else None)


RECORDS = [_record(variant, tokens, us) for tokens, times in TIMES.items() for variant, us in times.items()]


def test_a_row_per_number_of_tokens_holds_all_products_and_the_chosen_product() -> None:
    (table,) = tables(list(reversed(RECORDS)))
    layer = "M=128 K=256 bfloat16 group=128"
    assert [row.values for row in table.rows] == [
        (layer, 16, 10.0, 12.0, 20.0, 15.0, None, 10.0, "int4_gemm", 2.0, 1.5),
        (layer, 64, 20.0, 16.0, 24.0, 16.0, None, 16.0, "int4_fp8_gemm", 1.5, 1.0),
        (layer, 128, 40.0, 30.0, 24.0, 15.0, None, 24.0, "fp8", 1.0, 15 / 24),
    ]
    assert f"{layer}: int4_gemm from 16, int4_fp8_gemm from 64, fp8 from 128" in table.foot


def test_means_compare_the_faster_int4_product_over_whole_cases() -> None:
    second = [_record(variant, 128, us, rows=256) for variant, us in {**TIMES[128], "int4_fp8": 7.5, "optimized": 24.0}.items()]
    lacking = [_record("baseline", 128, 1.0, rows=512)]
    (table,) = tables([*RECORDS, *second, *lacking])
    assert table.foot[-1] == (
        "n = 128: the faster int4 product: 1.60x row-wise fp8 (1.00x as chosen), 1.00x tensor-wise fp8 (0.62x as chosen), 2 cases"
    )


def test_the_last_record_counts_and_a_failed_record_does_not() -> None:
    failed = changed(_record("baseline", 16, 5.0), status="failed", reason="wrong", **NO_TIMES)
    (table,) = tables([*RECORDS, failed, _record("baseline", 16, 9.0)])
    assert table.rows[0].values[2] == 9.0
    assert tables([failed]) == []


def test_compare_shows_the_table_for_records_of_its_operators() -> None:
    assert [table.columns[0].name for table in own_tables(RECORDS)] == ["layer"]
