"""Reports: the published table again from its CSV, and exact text for small literal records."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from literal_records import changed, literal

from kerneltune.files import data_root
from kerneltune.records import Record, load
from kerneltune.reporting import tables
from kerneltune.reporting.naming import case_names

RECORDED = data_root("results") / "nvidia_h200"
PUBLISHED = Path(__file__).parent / "data" / "te_pr593_rmsnorm_ab.csv"
OFF_BY_A_HUNDREDTH = 7
"""Published speed-ups were taken from unrounded times, so 7 of the 80 differ by 0.01 from the ratio of the printed ones."""

NO_TIMES = dict.fromkeys(["time_us", "gbps", "pct_ceiling", "ci_low_us", "ci_high_us", "n", "aa_floor"])


def record(us: float = 100.0, **changes: Any) -> Record:
    return literal(us, **changes)


def failed(**changes: Any) -> Record:
    return record(**{**NO_TIMES, "status": "failed", "reason": "y: 3 of 9 values\ndiffer", **changes})


def checked(**changes: Any) -> Record:
    return record(**{**NO_TIMES, "status": "checked", "device": "interpreter", **changes})


def published() -> list[dict[str, str]]:
    with PUBLISHED.open() as file:
        return list(csv.DictReader(file))


def published_rows() -> list[tables.Row]:
    """The published milliseconds and GB/s as records."""
    sides: dict[str, list[Record]] = {"A": [], "B": []}
    for line in published():
        axes = {"M": int(line["M"]), "N": int(line["N"])}
        for side, records in sides.items():
            same = {"op": f"rmsnorm_{line['kind']}", "dtype": line["dtype"], "quant": line["quant"], "axes": axes}
            records.append(record(float(line[f"{side}_ms"]) * 1000, gbps=float(line[f"{side}_gbps"]), **same))
    return tables.ab_rows(sides["A"], sides["B"])


def test_the_published_table_again() -> None:
    rows = published_rows()
    lines = tables.ab_text(rows, width=100).splitlines()
    assert lines[0] == "kind dtype    quant       M      N       A ms       B ms    A GB/s    B GB/s   speedup"
    assert lines[1] == "-" * 86
    assert lines[2] == "bwd  bfloat16 none       29  17389     0.0459     0.0486      67.5      63.6      0.94x  -"
    assert lines[3] == "bwd  bfloat16 none      256  65536     0.0556     0.0568    1813.9    1778.1      0.98x"
    off = 0
    for line, want in zip(lines[2:82], published(), strict=True):
        start = f"{want['kind']:<4} {want['dtype']:<8} {want['quant']:<6} {want['M']:>6} {want['N']:>6}"
        times = f"{want['A_ms']:>10} {want['B_ms']:>10} {want['A_gbps']:>9} {want['B_gbps']:>9}"
        assert line[:76] == f"{start} {times}"
        speedup, _, mark = line[76:].partition("x")
        assert mark == ("  " + want["mark"] if want["mark"] else "")
        hundredths = round(float(speedup) * 100) - round(float(want["speedup"]) * 100)
        assert hundredths in (-1, 0, 1)
        off += hundredths != 0
    assert off == OFF_BY_A_HUNDREDTH


def test_the_summary_of_the_published_table() -> None:
    assert tables.ab_text(published_rows()).splitlines()[82:] == [
        "",
        "80 rows: geometric mean 1.45x, range 0.94x to 7.48x",
        "wins 47, ties 32, losses 1",
        "  bwd none: 20 rows, geometric mean 1.08x",
        "  fwd fp8: 20 rows, geometric mean 1.06x",
        "  fwd fp8_t: 20 rows, geometric mean 3.27x",
        "  fwd none: 20 rows, geometric mean 1.17x",
    ]


def test_the_published_csv_again() -> None:
    lines = list(csv.DictReader(io.StringIO(tables.ab_csv(published_rows()))))
    columns = list(published()[0])
    assert list(lines[0])[: len(columns)] == columns
    for line, want in zip(lines, published(), strict=True):
        assert {name: line[name] for name in columns if name != "speedup"} == {n: want[n] for n in columns if n != "speedup"}


def test_80_columns_hold_the_same_columns() -> None:
    lines = tables.ab_text(published_rows(), width=80).splitlines()
    assert lines[0] == "kind dtype    quant     M     N   A ms   B ms A GB/s B GB/s speedup"
    assert lines[2] == "bwd  bfloat16 none     29 17389 0.0459 0.0486   67.5   63.6    0.94x  -"
    assert max(map(len, lines)) <= 80


def test_other_axes_and_long_names_widen_their_columns() -> None:
    axes = {"E": 8, "M": 8192, "N": 4096, "K": 7168}
    same: dict[str, Any] = {"op": "grouped_gemm", "quant": "blockwise", "axes": axes}
    lines = tables.ab_text(tables.ab_rows([record(**same)], [record(50.0, **same)]), width=120).splitlines()
    assert lines[0] == ("kind dtype    quant          E      M      N      K       A ms       B ms    A GB/s    B GB/s   speedup")
    assert lines[2] == (
        "gemm bfloat16 blockwise      8   8192   4096   7168     0.1000     0.0500    1000.0    1000.0      2.00x  +"
    )


def quantised() -> list[tables.Row]:
    """Two operators, one of them in two layouts and with an axis of its own."""
    both = [
        record(op=op, options={"pow2": True, "layout": layout}, axes=axes)
        for op, layout, axes in (
            ("cast_2d", "row", {"M": 8, "K": 16}),
            ("cast_experts", "row", {"E": 4, "K": 16, "N": 32}),
            ("cast_2d", "both", {"M": 8, "K": 16}),
            ("cast_2d", "row", {"M": 8, "K": 32}),
        )
    ]
    return tables.ab_rows(both, [changed(side, time_us=50.0) for side in both])


def test_where_the_columns_do_not_fit_shapes_stand_under_what_they_share() -> None:
    numbers = "0.1000 0.0500 1000.0 1000.0    2.00x  +"
    assert tables.ab_text(quantised(), width=78).splitlines()[:9] == [
        "  shape     A ms   B ms A GB/s B GB/s speedup",
        "-" * 45,
        "2d bfloat16 fp8 layout=row M×K",
        f"  8×16    {numbers}",
        f"  8×32    {numbers}",
        "experts bfloat16 fp8 layout=row E×K×N",
        f"  4×16×32 {numbers}",
        "2d bfloat16 fp8 layout=both M×K",
        f"  8×16    {numbers}",
    ]
    wide = tables.ab_text(quantised(), width=79).splitlines()
    assert wide[0] == "kind    dtype    quant layout M  K E  N   A ms   B ms A GB/s B GB/s speedup"
    assert wide[2:4] == [
        f"2d      bfloat16 fp8   row    8 16      {numbers}",
        f"experts bfloat16 fp8   row      16 4 32 {numbers}",
    ]


@pytest.mark.parametrize("family", [path.stem for path in sorted(RECORDED.glob("*.jsonl"))])
@pytest.mark.parametrize("width", [80, 120])
def test_every_recorded_table_fits_and_tells_all_rows_apart(family: str, width: int) -> None:
    records = load(RECORDED / f"{family}.jsonl")
    rows = tables.ab_rows(*([r for r in records if r.variant == "baseline"] for _ in "ab"))
    lines = tables.ab_text(rows, width).splitlines()
    table = lines[: lines.index("")]
    assert max(map(len, table)) <= width
    if family == "rmsnorm":
        assert lines[0].split("A ms")[0].split() == ["kind", "dtype", "quant", "M", "N"]
    named = [name.heading + name.shape for name in case_names(row.a for row in rows)]
    assert len(set(named)) == len(rows) > 0


def test_pairs_are_of_one_key_and_one_device() -> None:
    a = [record(), record(quant="none"), record(device="NVIDIA H100"), record(policy="hot")]
    b = [record(90.0), record(50.0, case="renamed"), record(policy="eager"), record(device="AMD MI300X")]
    rows = tables.ab_rows(a, b)
    assert [(row.a.quant, row.b.time_us) for row in rows] == [("fp8", 50.0)]


@pytest.mark.parametrize(("time_us", "mark"), [(95.2, "+"), (95.3, ""), (105.2, ""), (105.3, "-")])
def test_marks_come_from_the_unrounded_speedup(time_us: float, mark: str) -> None:
    (row,) = tables.ab_rows([record()], [record(time_us)])
    assert row.mark == mark


def test_a_row_that_failed_shows_its_reason_and_no_time() -> None:
    rows = tables.ab_rows(
        [record(), record(quant="none")], [failed(), record(50.0, quant="none", pct_ceiling=80.0, aa_floor=0.01)]
    )
    assert tables.ab_text(rows) == (
        "kind dtype    quant       M      N       A ms       B ms    A GB/s    B GB/s   speedup\n"
        f"{'-' * 86}\n"
        "fwd  bfloat16 fp8      8192   4096  B failed: y: 3 of 9 values differ\n"
        "fwd  bfloat16 none     8192   4096     0.1000     0.0500    1000.0    1000.0      2.00x  +\n"
        "\n"
        "1 of 2 rows not compared\n"
        "1 row: geometric mean 2.00x, range 2.00x to 2.00x\n"
        "wins 1, ties 0, losses 0\n"
        "  fwd none: 1 row, geometric mean 2.00x\n"
        "B reaches 80.0 % of the ceiling in the median\n"
        "A/A floor, a variant against itself: at most 1.0%\n"
    )
    assert tables.ab_text([]).endswith("\n\nno rows to compare\n")
    assert tables.ab_text(rows[:1]).endswith("\n\n1 of 1 rows not compared\n")


def test_ab_markdown() -> None:
    b = record(50.0, ci_low_us=49.0, ci_high_us=51.0, pct_ceiling=80.0, aa_floor=0.01)
    rows = tables.ab_rows([record(), record(quant="none")], [b, failed(quant="none")])
    assert tables.ab_markdown(rows) == (
        "| kind | dtype | quant | M | N | A ms | B ms | A GB/s | B GB/s | speedup |  | interval | B % of ceiling | A/A floor |\n"
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| fwd | bfloat16 | fp8 | 8192 | 4096 | 0.1000 | 0.0500 | 1000.0 | 1000.0 | 2.00x | + | 1.96x–2.04x | 80.0 | 1.0% |\n"
        "| fwd | bfloat16 | none | 8192 | 4096 |  |  |  |  | B failed: y: 3 of 9 values differ |  |  |  |  |\n"
        "\n"
        "- 1 of 2 rows not compared\n"
        "- 1 row: geometric mean 2.00x, range 2.00x to 2.00x\n"
        "- wins 1, ties 0, losses 0\n"
        "- fwd fp8: 1 row, geometric mean 2.00x\n"
        "- B reaches 80.0 % of the ceiling in the median\n"
        "- A/A floor, a variant against itself: at most 1.0%\n"
    )


def test_rows_of_different_runs_have_no_interval() -> None:
    """The intervals are of what differs within a run, so they say nothing of another GPU or other code."""
    runs = [{"commit": "1", "unit": "a"}, {"commit": "2", "unit": "a"}, {"commit": "1", "unit": "b"}, {"commit": "2", "unit": ""}]
    sizes = [{"M": size, "N": 8} for size in (1, 2, 3, 4)]
    a = [record(axes=axes, **runs[0]) for axes in sizes]
    b = [record(50.0, axes=axes, **run) for axes, run in zip(sizes, runs, strict=True)]
    rows = tables.ab_rows(a, [*b[:3], changed(b[3], commit="1")])
    said = "2 of 4 rows: A and B are of different runs (another commit or GPU unit): may differ by a few per cent"
    assert tables.ab_text(rows, width=120).endswith(f"\n{said}\n")
    assert tables.ab_markdown(rows).endswith(f"\n- {said}\n")
    assert [("2.00x–2.00x" in line) for line in tables.ab_markdown(rows).splitlines()[2:6]] == [True, False, False, True]
    lines = list(csv.DictReader(io.StringIO(tables.ab_csv(rows))))
    assert [line["speedup_low"] for line in lines] == ["2.0", "", "", "2.0"]
    assert [(line["A_unit"], line["B_unit"]) for line in lines] == [("a", "a"), ("a", "a"), ("a", "b"), ("a", "")]
    assert [(line["A_commit"], line["B_commit"]) for line in lines] == [("1", "1"), ("1", "2"), ("1", "1"), ("1", "1")]


def swept() -> list[Record]:
    long: dict[str, Any] = {"case": "llama3-70b-32768", "axes": {"M": 32768, "N": 8192}}
    return [
        record(pct_ceiling=40.0),
        record(50.0, variant="optimized", gbps=2000.0, pct_ceiling=80.0, config={"block": 1024}),
        record(quant="none", **long),
        failed(variant="optimized", quant="none", **long),
        failed(variant="liger", quant="none", status="skipped", reason="liger is not installed", **long),
        record(80.0, variant="torch.compile", quant="none", **long),
    ]


def test_sweep_text_in_full_columns() -> None:
    assert tables.sweep_text(swept(), width=120) == (
        "device: NVIDIA H200\n"
        "op          case             dtype    quant   variant       time µs   GB/s % ceiling vs baseline\n"
        "rmsnorm_fwd te-8192x4096     bfloat16 fp8     baseline       100.00 1000.0      40.0       1.00x\n"
        "                                            * optimized       50.00 2000.0      80.0       2.00x\n"
        "rmsnorm_fwd llama3-70b-32768 bfloat16 none    baseline       100.00 1000.0                 1.00x\n"
        "                                              optimized     failed: y: 3 of 9 values differ\n"
        "                                              liger         skipped: liger is not installed\n"
        "                                            * torch.compile   80.00 1000.0                 1.25x\n"
        "\n"
        "4 passed, 1 failed, 1 skipped\n"
    )


def test_sweep_text_in_80_columns() -> None:
    text = tables.sweep_text(swept(), width=80)
    assert text == (
        "device: NVIDIA H200\n"
        "    variant       time µs   GB/s % ceiling vs baseline\n"
        "rmsnorm_fwd te-8192x4096 bfloat16 fp8\n"
        "    baseline       100.00 1000.0      40.0       1.00x\n"
        "  * optimized       50.00 2000.0      80.0       2.00x\n"
        "rmsnorm_fwd llama3-70b-32768 bfloat16 none\n"
        "    baseline       100.00 1000.0                 1.00x\n"
        "    optimized     failed: y: 3 of 9 values differ\n"
        "    liger         skipped: liger is not installed\n"
        "  * torch.compile   80.00 1000.0                 1.25x\n"
        "\n"
        "4 passed, 1 failed, 1 skipped\n"
    )
    assert max(map(len, text.splitlines())) <= 80


def test_reasons_are_shown_on_up_to_three_lines() -> None:
    reason = "wrong: scales of the last columns overwrite the next group's, so that no row of it is what it should be"
    rows = tables.ab_rows([failed(reason=reason)], [record(50.0)])
    assert tables.ab_text(rows, width=80).splitlines()[2:6] == [
        "fwd  bfloat16 fp8   8192 4096  A failed: wrong: scales of the last columns",
        "                               overwrite the next group's, so that no row of it",
        "                               is what it should be",
        "",
    ]
    assert tables.sweep_text([failed(reason=reason)], 80).splitlines()[3:6] == [
        "    baseline failed: wrong: scales of the last columns overwrite the next",
        "             group's, so that no row of it is what it should be",
        "",
    ]
    narrow = tables.sweep_text([failed(reason=reason, variant="a_variant_of_a_long_name")], 50).splitlines()
    assert narrow[3:5] == ["    a_variant_of_a_long_name", "        failed: wrong: scales of the last columns"]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_longer_reasons_are_cut(width: int) -> None:
    lines = tables.sweep_text([failed(reason="x " * 300)], width).splitlines()
    assert max(map(len, lines)) <= width
    assert [line.endswith(" …") for line in lines].count(True) == 1


def test_the_interpreter_has_results_and_no_times() -> None:
    assert tables.sweep_text([checked(), checked(variant="optimized")], width=120) == (
        "device: interpreter (no GPU): results were checked for correctness; times do not exist\n"
        "op          case         dtype    quant   variant   time µs GB/s % ceiling vs baseline\n"
        "rmsnorm_fwd te-8192x4096 bfloat16 fp8     baseline  checked, not timed\n"
        "                                          optimized checked, not timed\n"
        "\n"
        "2 checked\n"
    )


def test_options_are_shown_where_they_tell_rows_apart() -> None:
    lines = tables.sweep_text([record(options={"pad": 0}), record(options={"pad": 8}), record(quant="none")], width=120)
    assert [line[12:32] for line in lines.splitlines()[2:5]] == [
        "te-8192x4096 pad=0 b",
        "te-8192x4096 pad=8 b",
        "te-8192x4096       b",
    ]


def test_a_part_is_never_the_best() -> None:
    rows = [record(), record(variant="optimized", time_us=50.0), record(variant="optimized_gemms", time_us=10.0)]
    parts = frozenset({(rows[0].op, "optimized_gemms")})
    assert "* optimized " in tables.sweep_text(rows, 120, parts) and "* optimized_gemms " in tables.sweep_text(rows, 120)
    assert "**optimized**" in tables.sweep_markdown(rows, parts)
    lines = csv.DictReader(io.StringIO(tables.sweep_csv(rows, parts)))
    assert [line["variant"] for line in lines if line["best"]] == ["optimized"]


def test_a_part_has_a_time_alone() -> None:
    rows = [record(pct_ceiling=50.0), record(variant="optimized_gemms", time_us=10.0, pct_ceiling=500.0)]
    parts = frozenset({(rows[0].op, "optimized_gemms")})
    (text,) = (line for line in tables.sweep_text(rows, 120, parts).splitlines() if "optimized_gemms" in line)
    assert text.split() == ["optimized_gemms", "10.00"]
    assert "| optimized_gemms | 10.00 |  |  |  |" in tables.sweep_markdown(rows, parts)
    whole, part = csv.DictReader(io.StringIO(tables.sweep_csv(rows, parts)))
    assert all(whole[name] and not part[name] for name in ("gbps", "pct_ceiling", "vs_baseline")) and part["time_us"] == "10.0"


def test_sweep_markdown() -> None:
    assert tables.sweep_markdown(swept()[:4]) == (
        "device: NVIDIA H200\n"
        "\n"
        "| op | case | dtype | quant | variant | time µs | GB/s | % ceiling | vs baseline | config |\n"
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- |\n"
        "| rmsnorm_fwd | te-8192x4096 | bfloat16 | fp8 | baseline | 100.00 | 1000.0 | 40.0 | 1.00x | - |\n"
        "| rmsnorm_fwd | te-8192x4096 | bfloat16 | fp8 | **optimized** | 50.00 | 2000.0 | 80.0 | 2.00x | block=1024 |\n"
        "| rmsnorm_fwd | llama3-70b-32768 | bfloat16 | none | **baseline** | 100.00 | 1000.0 |  | 1.00x | - |\n"
        "| rmsnorm_fwd | llama3-70b-32768 | bfloat16 | none | optimized | failed: y: 3 of 9 values differ |  |  |  | - |\n"
        "\n"
        "3 passed, 1 failed\n"
    )


def test_sweep_csv() -> None:
    lines = list(csv.DictReader(io.StringIO(tables.sweep_csv(swept()))))
    assert [line["best"] for line in lines] == ["", "*", "", "", "", "*"]
    assert lines[1] == {
        "op": "rmsnorm_fwd",
        "case": "te-8192x4096",
        "M": "8192",
        "N": "4096",
        "dtype": "bfloat16",
        "quant": "fp8",
        "options": "",
        "policy": "cold",
        "variant": "optimized",
        "status": "passed",
        "time_us": "50.0",
        "ci_low_us": "50.0",
        "ci_high_us": "50.0",
        "gbps": "2000.0",
        "pct_ceiling": "80.0",
        "aa_floor": "",
        "vs_baseline": "2.0",
        "best": "*",
        "config": "block=1024",
        "device": "NVIDIA H200",
        "reason": "",
    }
    assert (lines[3]["status"], lines[3]["time_us"], lines[3]["reason"]) == ("failed", "", "y: 3 of 9 values differ")


def test_no_records() -> None:
    assert tables.sweep_text([]).startswith("no records\n")
    assert tables.sweep_csv([]).count("\n") == 1
