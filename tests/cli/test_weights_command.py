"""`kerneltune weights`: int4 against 8 and 16 bits, from records."""

from pathlib import Path

from command_line import NO_TIMES, record, refused, run
from literal_records import changed

from kerneltune import records
from kerneltune.records import Record
from kerneltune.workloads.weight_table import crossover, weight_markdown, weight_rows, weight_text

TIMES = {
    ("int4_gemm", "optimized"): {64: 20.0, 16: 10.0, 128: 40.0},
    ("int4_gemm", "baseline"): {16: 5.0},
    ("int4_gemm", "dequantised"): {16: 6.0},
    ("int4_gemm", "humming"): {16: 14.0, 64: 25.0},
    ("int4_gemm", "tinygemm"): {16: 40.0},
    ("fp8_gemm", "optimized"): {16: 15.0, 64: 20.0, 128: 30.0},
    ("fp8_gemm", "scaled_mm"): {16: 16.0, 64: 19.0},
    ("fp16_gemm", "torch"): {16: 22.0, 64: 25.0, 128: 45.0},
}


def _record(op: str, variant: str, tokens: int, time_us: float) -> Record:
    options = {"group": 64, "zeros": False} if op == "int4_gemm" else {}
    axes = {"N": tokens, "M": 128, "K": 256}
    return record(time_us, op=op, variant=variant, dtype="float16", axes=axes, options=options, gbps=900.0, pct_ceiling=55.0)


RECORDS = [_record(*kind, tokens, us) for kind, times in TIMES.items() for tokens, us in times.items()]


def test_rows_hold_the_fastest_of_each_kind() -> None:
    rows = weight_rows(RECORDS)
    assert [(r.tokens, r.int4, r.peer, r.fp8, r.fp16) for r in rows] == [
        (16, 10, 14, 15, 22),
        (64, 20, 25, 19, 25),
        (128, 40, None, 30, 45),
    ]
    assert {(r.layer, r.gbps, r.pct_ceiling) for r in rows} == {("M=128 K=256 float16 group=64", 900, 55)}
    assert weight_rows(RECORDS, "hot") == []


def test_the_last_record_counts_and_a_failed_one_does_not() -> None:
    newer = [*RECORDS, _record("fp8_gemm", "optimized", 16, 9.0)]
    assert weight_rows(newer)[0].fp8 == 9
    failed = changed(_record("fp8_gemm", "optimized", 16, 9.0), status="failed", reason="wrong", **NO_TIMES)
    assert weight_rows([*RECORDS, failed])[0].fp8 == 16


def test_crossovers() -> None:
    rows = weight_rows(RECORDS)
    assert crossover(rows, "fp8") == "fp8 faster from n=64"
    assert crossover(rows, "fp16") == "fp16 never faster up to n=128"
    assert crossover(rows[:1], "peer") == "peer never faster up to n=16"
    assert crossover(rows[2:], "peer") == "peer not timed"
    slower = weight_rows([*RECORDS, _record("fp8_gemm", "optimized", 128, 60.0)])
    assert crossover(slower, "fp8") == "fp8 faster at n=64 only"


def test_the_table_as_text() -> None:
    text = weight_text(weight_rows(RECORDS))
    assert text == (
        "M=128 K=256 float16 group=64: fp8 faster from n=64, fp16 never faster up to\n"
        "  n=128\n"
        "  n int4 µs GB/s % ceiling int4 peer µs fp8 µs fp16 µs x peer x fp8 x fp16\n"
        " 16    10.0  900      55.0         14.0   15.0    22.0   1.40  1.50   2.20\n"
        " 64    20.0  900      55.0         25.0   19.0    25.0   1.25  0.95   1.25\n"
        "128    40.0  900      55.0                30.0    45.0         0.75   1.12\n"
        "\n"
        "n <= 32: 1.40x the fastest of int4 peers, worst 1.40x (1 cases)\n"
        "  n = 16: 1.40x, 1.40 to 1.40x (1 cases)\n"
        "  n = 64: 1.25x, 1.25 to 1.25x (1 cases)\n"
        "n <= 32: 1.50x the fastest of fp8, worst 1.50x (1 cases)\n"
        "  n = 16: 1.50x, 1.50 to 1.50x (1 cases)\n"
        "  n = 64: 0.95x, 0.95 to 0.95x (1 cases)\n"
        "  n = 128: 0.75x, 0.75 to 0.75x (1 cases)\n"
        "n <= 32: 2.20x the fastest of fp16, worst 2.20x (1 cases)\n"
        "  n = 16: 2.20x, 2.20 to 2.20x (1 cases)\n"
        "  n = 64: 1.25x, 1.25 to 1.25x (1 cases)\n"
        "  n = 128: 1.12x, 1.12 to 1.12x (1 cases)\n"
    )
    assert weight_markdown(weight_rows(RECORDS)).splitlines()[2].startswith("| M=128 K=256 float16 group=64 | 16 | 10.0 | 900 |")


def test_the_command_reads_records(tmp_path: Path) -> None:
    file = tmp_path / "weight_only.jsonl"
    records.append(file, RECORDS)
    result = run("weights", "--from", file)
    assert result.exit_code == 0 and result.stdout == weight_text(weight_rows(RECORDS), width=100)
    other = tmp_path / "other.jsonl"
    records.append(other, [record()])
    assert refused("weights", "--from", other).startswith("error: no records of int4 products")
