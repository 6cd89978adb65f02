"""Int4 against 8 and 16 bits: the table, from records."""

from pathlib import Path

from command_line import NO_TIMES, record, run
from literal_records import changed

from kerneltune import records
from kerneltune.records import Record
from kerneltune.workloads.weight_table import crossover, tables, weight_rows

TIMES = {
    ("int4_gemm", "optimized"): {64: 20.0, 16: 10.0, 128: 40.0},
    ("int4_gemm", "baseline"): {16: 5.0},
    ("int4_gemm", "humming"): {16: 14.0, 64: 25.0},
    ("int4_gemm", "tinygemm"): {16: 40.0},
    ("int4_gemm", "scaled_mm"): {16: 15.0, 128: 30.0},
    ("int4_gemm", "dequantised"): {16: 22.0},
    ("fp8_gemm", "scaled_mm"): {16: 16.0, 64: 19.0},
    ("fp16_gemm", "torch"): {16: 23.0, 64: 25.0, 128: 45.0},
}


def _record(op: str, variant: str, tokens: int, time_us: float) -> Record:
    options = {"group": 64, "zeros": False} if op == "int4_gemm" else {}
    axes = {"N": tokens, "M": 128, "K": 256}
    return record(time_us, op=op, variant=variant, dtype="float16", axes=axes, options=options, gbps=900.0, pct_ceiling=55.0)


RECORDS = [_record(*kind, tokens, us) for kind, times in TIMES.items() for tokens, us in times.items()]


def test_rows_hold_the_fastest_of_each_kind() -> None:
    rows = weight_rows(RECORDS)
    assert [tuple(r[name] for name in ("n", "int4_us", "peer_us", "fp8_us", "fp16_us")) for r in rows] == [
        (16, 10, 14, 15, 22),
        (64, 20, 25, 19, 25),
        (128, 40, None, 30, 45),
    ]
    assert {(r["layer"], r["gbps"], r["pct_ceiling"]) for r in rows} == {("M=128 K=256 float16 group=64", 900, 55)}
    assert weight_rows(RECORDS, "hot") == []


def test_the_last_record_counts_and_a_failed_one_does_not() -> None:
    newer = [*RECORDS, _record("int4_gemm", "scaled_mm", 16, 9.0)]
    assert weight_rows(newer)[0]["fp8_us"] == 9
    failed = changed(_record("int4_gemm", "scaled_mm", 16, 9.0), status="failed", reason="wrong", **NO_TIMES)
    assert weight_rows([*RECORDS, failed])[0]["fp8_us"] == 16


def test_crossovers() -> None:
    rows = weight_rows(RECORDS)
    assert crossover(rows, "fp8") == "fp8 faster from n=64"
    assert crossover(rows, "fp16") == "fp16 never faster up to n=128"
    assert crossover(rows[:1], "peer") == "peer never faster up to n=16"
    assert crossover(rows[2:], "peer") == "peer not timed"
    slower = weight_rows([*RECORDS, _record("int4_gemm", "scaled_mm", 128, 60.0)])
    assert crossover(slower, "fp8") == "fp8 faster at n=64 only"


def test_the_table_as_text() -> None:
    (table,) = tables(RECORDS)
    lines = table.text(80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "n <= 32: 1.40x the fastest of int4 peers, worst 1.40x (1 cases)"
    start = next(i for i, line in enumerate(lines) if line.startswith("layer"))
    assert [" ".join(line.split()) for line in lines[start : start + 4]] == [
        "layer n int4 µs fp8 µs x peer x fp8 x fp16",
        "M=128 K=256 float16 group=64 16 10.0 15.0 1.40x 1.50x 2.20x",
        "64 20.0 19.0 1.25x 0.95x 1.25x",
        "128 40.0 30.0 0.75x 1.12x",
    ]
    assert table.foot[1] == "M=128 K=256 float16 group=64: fp8 faster from n=64, fp16 never faster up to n=128"


def test_compare_shows_the_table_of_the_workload(tmp_path: Path) -> None:
    file = tmp_path / "weight_only.jsonl"
    records.append(file, RECORDS)
    assert run("compare", file).stdout == tables(RECORDS)[0].text(100)
    other = tmp_path / "other.jsonl"
    records.append(other, [*RECORDS, record(), record(50.0, variant="optimized")])  # of an operator without a table of its own
    assert run("compare", other, "--op", "rmsnorm_fwd").stdout.startswith("A: baseline; B: optimized")
