"""Reports: the published table again from its CSV, and exact text for small literal records."""

import csv
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
from asserting import every
from literal_records import changed, literal

from kerneltune.files import data_root
from kerneltune.records import Record, load
from kerneltune.reporting import pairing, tables
from kerneltune.reporting.naming import case_names
from kerneltune.table import join_tables

RECORDED = data_root("results") / "nvidia_h200"
PUBLISHED = Path(__file__).parents[1] / "data" / "te_pr593_rmsnorm_ab.csv"
OFF_BY_A_HUNDREDTH = 7

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


def published_rows() -> list[pairing.Comparison]:
    """Return the published milliseconds and GB/s as records."""
    sides: dict[str, list[Record]] = {"A": [], "B": []}
    for line in published():
        axes = {"M": int(line["M"]), "N": int(line["N"])}
        for side, records in sides.items():
            same = {"op": f"rmsnorm_{line['kind']}", "dtype": line["dtype"], "quant": line["quant"], "axes": axes}
            records.append(record(float(line[f"{side}_ms"]) * 1000, gbps=float(line[f"{side}_gbps"]), **same))
    return pairing.ab_rows(sides["A"], sides["B"])


def test_default_pair_is_that_asked_for_else_baseline_and_optimized() -> None:
    rows = [record(variant=name) for name in ("old", "new", "liger")]
    assert pairing.default_pair([record(variant=name) for name in ("baseline", "new", "optimized")]) == ("baseline", "optimized")
    peers = [changed(row, role="peer") if row.variant == "liger" else row for row in rows]
    assert pairing.default_pair(peers) == ("best-peer", "old")
    further = [record(variant="new", axes={"M": 8192, "N": n}) for n in (1, 2)]
    assert pairing.default_pair([*peers, *further]) == ("old", "new")
    assert pairing.default_pair(rows, "new", "liger") == ("new", "liger")
    with pytest.raises(ValueError, match=r"^b: 'newer': did you mean new\? expected one of old, new, liger$"):
        pairing.default_pair(rows, b="newer")


def test_ab_table_of_published_records_equals_the_published_table() -> None:
    """Because the published speed-ups come from unrounded times, some differ by 0.01 from the ratio of the printed times."""
    table = tables.ab_table(published_rows())
    lines = list(csv.DictReader(io.StringIO(table.csv())))
    assert len(lines) == 80
    wanted = {(w["kind"], w["dtype"], w["quant"], w["M"], w["N"]): w for w in published()}
    off = 0
    for line in lines:
        want = wanted.pop((line["kind"], line["dtype"], line["quant"], line["M"], line["N"]))
        for side in "AB":
            assert f"{float(line[f'{side}_us']) / 1000:.4f}" == want[f"{side}_ms"]
            assert f"{float(line[f'{side}_gbps']):.1f}" == want[f"{side}_gbps"]
        assert line["mark"] == want["mark"]
        hundredths = round(float(f"{float(line['speedup']):.2f}") * 100) - round(float(want["speedup"]) * 100)
        assert hundredths in (-1, 0, 1)
        off += hundredths != 0
    assert off == OFF_BY_A_HUNDREDTH
    assert not wanted


def test_ab_table_text_begins_with_its_summary_and_is_sorted() -> None:
    lines = tables.ab_table(published_rows(), "baseline", "optimized").text(width=100).splitlines()
    assert lines[:7] == [
        "A: baseline; B: optimized",
        "B is 1.45x as fast as A: geometric mean of 80 rows, 0.94x to 7.48x; 47 faster (+), 32 within 5 %, 1",
        "  slower (-)",
        "  bwd none: 1.08x in 20 rows",
        "  fwd none: 1.17x in 20 rows",
        "  fwd fp8: 1.06x in 20 rows",
        "  fwd fp8_t: 3.27x in 20 rows",
    ]
    assert lines[8] == "kind dtype    quant     M     N   A µs   B µs speedup   A GB/s B GB/s 95 % interval"
    assert lines[9] == "bwd  bfloat16 none     29 17389  45.90  48.60   0.94x -     68     64 0.94x–0.94x"
    kinds = [tuple(line.split()[:3]) for line in lines[9:89]]
    assert kinds == sorted(kinds, key=lambda kind: list(dict.fromkeys(kinds)).index(kind))
    assert len(set(kinds)) == 8
    assert lines[-1] == "NVIDIA H200, driver 570, torch 2.9, triton 3.5, commit 0, 2026-11-21"


def test_ab_table_text_in_few_columns_names_hidden_columns() -> None:
    lines = tables.ab_table(published_rows()).text(width=60).splitlines()
    assert max(map(len, lines)) <= 60
    assert next(line for line in lines if line.startswith("kind")) == "kind dtype    quant     M     N   A µs   B µs speedup"
    above = " ".join(" ".join(lines[: lines.index("")]).split())
    assert above.endswith("not shown in 60 columns: A GB/s, B GB/s, 95 % interval; a wider terminal shows all")
    wider = tables.ab_table(published_rows()).text(width=80)
    assert "95 % interval" in next(line for line in wider.splitlines() if line.startswith("kind"))
    assert "not shown in 80 columns: A GB/s, B GB/s;" in " ".join(wider.split())
    with_format = join_tables([tables.ab_table(published_rows())], "text", 60)
    assert "a wider terminal or --format markdown|csv shows all" in " ".join(with_format.split())


def test_ab_table_text_prints_values_that_all_rows_share_once() -> None:
    rows = pairing.ab_rows([record(), record(axes={"M": 1, "N": 2})], [record(50.0), record(50.0, axes={"M": 1, "N": 2})])
    lines = tables.ab_table(rows).text(100).splitlines()
    assert "all rows: kind fwd, dtype bfloat16, quant fp8" in lines
    assert next(line for line in lines if "A µs" in line).split()[:2] == ["M", "N"]


@pytest.mark.parametrize("family", [path.stem for path in sorted(RECORDED.glob("*.jsonl"))])
def test_tables_of_recorded_families_fit_and_name_all_rows_differently(family: str) -> None:
    records = load(RECORDED / f"{family}.jsonl")
    rows = pairing.ab_rows(*([r for r in records if r.variant == "baseline"] for _ in "ab"))
    for table, width in itertools.product((tables.ab_table(rows), tables.sweep_table(records)), (80, 120)):
        text = table.text(width).splitlines()
        assert max(len(line) for line in text if "not shown" not in line) <= width or "shapes" in table.text(width)
    named = [name.title + name.shape for name in case_names(row.a for row in rows)]
    assert len(set(named)) == len(rows) > 0


def test_ab_summary_names_up_to_five_rows_20_percent_slower_with_the_slowest_first() -> None:
    ratios = (1.2, 0.81, 0.8, 0.5)
    a = [record(100.0 * ratio, axes={"M": m, "N": 64}) for m, ratio in enumerate(ratios, start=1)]
    b = [record(100.0, axes=row.axes) for row in a]
    line_of_two = "20 % slower or more in 2 rows: 0.50x fwd fp8 bf16 4×64; 0.80x fwd fp8 bf16 3×64"
    assert line_of_two in tables.ab_table(pairing.ab_rows(a, b)).head
    assert not any("20 %" in line for line in tables.ab_table(pairing.ab_rows(a[:2], b[:2])).head)
    many = [record(10.0, axes={"M": m, "N": 64}) for m in range(1, 8)]
    (line,) = (x for x in tables.ab_table(pairing.ab_rows(many, [record(100.0, axes=r.axes) for r in many])).head if "20 %" in x)
    assert line.startswith("20 % slower or more in 7 rows: ")
    assert line.endswith("; …")
    assert line.count("0.10x") == 5


def test_best_peer_is_the_fastest_of_every_case() -> None:
    rows = [
        record(), record(90.0, variant="liger", role="peer"), record(80.0, variant="quack", role="peer"),
        record(70.0, variant="liger", role="peer", quant="none"), failed(variant="eager", role="peer"),
    ]  # fmt: skip
    peers = pairing.best_peers(rows)
    assert [(r.variant, r.time_us, r.quant) for r in peers] == [("quack", 80.0, "fp8"), ("liger", 70.0, "none")]
    ours = [record(40.0, variant="optimized"), record(70.0, variant="optimized", quant="none")]
    table = tables.ab_table(pairing.ab_rows(peers, ours), pairing.BEST_PEER, "optimized")
    assert table.head[0] == "A: the fastest peer of every case (quack 1, liger 1); B: optimized"
    assert "quack" in table.text()
    assert "A is" in table.text()


def test_ab_table_share_is_of_the_peak_if_arithmetic_bounds_the_row() -> None:
    """1e12 operations in 1 ms are 1000 TFLOP/s: half of the fp8 peak of an H200."""
    big = {"flops": 10**12, "pct_ceiling": 5.0, "gbps": 100.0, "ceiling_gbps": 4000.0}
    gemm = [record(2000.0, **big), record(1000.0, **big)]
    table = tables.ab_table(pairing.ab_rows(gemm[:1], gemm[1:]))
    assert "B reaches 50.5 % of the peak in the median" in table.head
    assert "B % peak" in table.text(120)
    light = [record(quant="none", pct_ceiling=80.0), record(50.0, quant="none", pct_ceiling=80.0)]
    mixed = tables.ab_table(pairing.ab_rows([gemm[0], light[0]], [gemm[1], light[1]]))
    assert "B reaches 80.0 % of the ceiling (1 row) and 50.5 % of the peak (1 row) in the median" in mixed.head
    lines = list(csv.DictReader(io.StringIO(mixed.csv())))
    assert [(line["bound"], round(float(line["B_pct_bound"]), 1)) for line in lines] == [("peak", 50.5), ("ceiling", 80.0)]
    swept_rows = list(csv.DictReader(io.StringIO(tables.sweep_table(gemm).csv())))
    assert [(line["bound"], round(float(line["pct_bound"]), 1)) for line in swept_rows] == [("peak", 25.3), ("peak", 50.5)]


def test_tables_hide_the_share_of_a_bound_if_times_include_the_host() -> None:
    sides = [
        record(2000.0, policy="eager", pct_ceiling=0.9),
        record(1000.0, variant="optimized", policy="eager", pct_ceiling=1.8),
    ]
    rows = pairing.ab_rows(sides[:1], sides[1:])
    text = tables.ab_table(rows).text(200)
    assert ("ceiling" in text, "1.8" in text, "2.00x" in text) == (False, False, True)
    assert "ceiling" not in tables.sweep_table(sides).text(200)
    whole = tables.families_table({"steps": sides}, {"steps": ("baseline", "optimized")})
    assert ("bound" in whole.text(200), "2.00x" in whole.text(200)) == (False, True)


def test_ab_table_prints_commits_with_seven_digits() -> None:
    text = tables.ab_table(pairing.ab_rows([record(commit="a" * 40)], [record(50.0, commit="b" * 40 + "+")])).text(200)
    assert f"commit {'a' * 7} and {'b' * 7}+, 2026" in text


def test_ab_rows_pair_records_of_one_key_and_one_device() -> None:
    a = [record(), record(quant="none"), record(device="NVIDIA H100"), record(policy="hot")]
    b = [record(90.0), record(50.0, case="renamed"), record(policy="eager"), record(device="AMD MI300X")]
    rows = pairing.ab_rows(a, b)
    assert [(row.a.quant, row.b.time_us) for row in rows] == [("fp8", 50.0)]


@pytest.mark.parametrize(("time_us", "mark"), [(95.2, "+"), (95.3, ""), (105.2, ""), (105.3, "-")])
def test_ab_row_mark_comes_from_the_unrounded_speedup(time_us: float, mark: str) -> None:
    (row,) = pairing.ab_rows([record()], [record(time_us)])
    assert row.mark == mark


def test_ab_table_text_of_a_failed_row_has_its_reason_and_no_time() -> None:
    rows = pairing.ab_rows(
        [record(), record(quant="none")], [failed(), record(50.0, quant="none", pct_ceiling=80.0, aa_floor=0.01)]
    )
    assert tables.ab_table(rows).text(100) == (
        "A: A; B: B\n"
        "1 of 2 rows not compared\n"
        "B is 2.00x as fast as A: geometric mean of 1 row, 2.00x to 2.00x; 1 faster (+), 0 within 5 %, 0\n"
        "  slower (-)\n"
        "  fwd none: 2.00x in 1 row\n"
        "B reaches 80.0 % of the ceiling in the median\n"
        "noise, a variant against itself: at most 1.0%\n"
        "all rows: kind fwd, dtype bfloat16\n"
        "\n"
        "quant    M    N   A µs  B µs speedup   A GB/s B GB/s B % ceiling 95 % interval noise %\n"
        "fp8   8192 4096  B failed: y: 3 of 9 values differ\n"
        "none  8192 4096 100.00 50.00   2.00x +   1000   1000        80.0 2.00x–2.00x       1.0\n"
        "\n"
        "NVIDIA H200, driver 570, torch 2.9, triton 3.5, commit 0, 2026-11-21\n"
    )
    assert tables.ab_table([]).text() == "no rows to compare\n\nkind dtype quant A µs B µs speedup\n"


def test_ab_table_markdown_equals_the_expected_text() -> None:
    b = record(50.0, ci_low_us=49.0, ci_high_us=51.0, pct_ceiling=80.0, aa_floor=0.01)
    rows = pairing.ab_rows([record(), record(quant="none")], [b, failed(quant="none")])
    assert tables.ab_table(rows, title="Norms").markdown() == (
        "### Norms\n"
        "\n"
        "- A: A; B: B\n"
        "- 1 of 2 rows not compared\n"
        "- B is 2.00x as fast as A: geometric mean of 1 row, 2.00x to 2.00x; 1 faster (+), 0 within 5 %, 0 slower (-)\n"
        "- fwd fp8: 2.00x in 1 row\n"
        "- B reaches 80.0 % of the ceiling in the median\n"
        "- noise, a variant against itself: at most 1.0%\n"
        "\n"
        "| kind | dtype | quant | M | N | A µs | B µs | speedup |  | A GB/s | B GB/s | B % ceiling | 95 % interval | noise % |\n"
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | --- | ---: |\n"
        "| fwd | bfloat16 | fp8 | 8192 | 4096 | 100.00 | 50.00 | 2.00x | + | 1000 | 1000 | 80.0 | 1.96x–2.04x | 1.0 |\n"
        "| fwd | bfloat16 | none | 8192 | 4096 | B failed: y: 3 of 9 values differ |  |  |  |  |  |  |  |  |\n"
        "\n"
        "- NVIDIA H200, driver 570, torch 2.9, triton 3.5, commit 0, 2026-11-21\n"
    )


def test_ab_rows_of_different_runs_have_no_interval() -> None:
    """The intervals are of what differs within a run, so they say nothing of another GPU or other code."""
    runs = [{"commit": "1", "unit": "a"}, {"commit": "2", "unit": "a"}, {"commit": "1", "unit": "b"}, {"commit": "2", "unit": ""}]
    sizes = [{"M": size, "N": 8} for size in (1, 2, 3, 4)]
    a = [record(axes=axes, **runs[0]) for axes in sizes]
    b = [record(50.0, axes=axes, **run) for axes, run in zip(sizes, runs, strict=True)]
    rows = pairing.ab_rows(a, [*b[:3], changed(b[3], commit="1")])
    note = "2 of 4 rows: A and B are of different runs (another commit or GPU serial): may differ by a few per cent"
    table = tables.ab_table(rows)
    assert table.head[-1] == note
    marked = [line for line in table.markdown().splitlines() if line.startswith("| fwd")]
    assert [("2.00x–2.00x" in line) for line in marked] == [True, False, False, True]
    lines = list(csv.DictReader(io.StringIO(table.csv())))
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


def test_sweep_table_text_in_130_columns_has_all_columns() -> None:
    assert tables.sweep_table(swept()).text(width=130) == (
        "device: NVIDIA H200\n"
        "all rows: op rmsnorm_fwd, dtype bfloat16\n"
        "\n"
        "case                 M    N quant   variant           µs GB/s % ceiling vs baseline\n"
        "te-8192x4096      8192 4096 fp8     baseline      100.00 1000      40.0       1.00x\n"
        "                                  * optimized      50.00 2000      80.0       2.00x\n"
        "llama3-70b-32768 32768 8192 none    baseline      100.00 1000                 1.00x\n"
        "                                    optimized  failed: y: 3 of 9 values differ\n"
        "                                    liger  skipped: liger is not installed\n"
        "                                  * torch.compile  80.00 1000                 1.25x\n"
        "\n"
        "4 passed, 1 failed, 1 skipped\n"
    )


def test_sweep_table_text_in_60_columns_keeps_times() -> None:
    text = tables.sweep_table(swept()).text(width=60)
    assert max(map(len, text.splitlines())) <= 60
    assert "* optimized" in text
    assert " 50.00" in text
    assert "not shown in 60 columns: " in text


def test_ab_table_text_prints_reasons_on_up_to_three_lines() -> None:
    reason = "wrong: scales of the last columns overwrite the next group's, so that no row of it is what it should be"
    rows = pairing.ab_rows([failed(reason=reason)], [record(50.0)])
    lines = tables.ab_table(rows).text(width=80).splitlines()
    at = next(i for i, line in enumerate(lines) if "A failed" in line)
    assert lines[at : at + 3] == [
        "fwd  bfloat16 fp8   8192 4096  A failed: wrong: scales of the last columns",
        "                               overwrite the next group's, so that no row of it",
        "                               is what it should be",
    ]


@pytest.mark.parametrize("width", [50, 80, 120])
def test_ab_table_text_cuts_longer_reasons(width: int) -> None:
    lines = tables.sweep_table([failed(reason="x " * 300)]).text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert [line.endswith(" …") for line in lines].count(True) == 1


def test_sweep_table_of_the_interpreter_has_no_times() -> None:
    text = tables.sweep_table([checked(), checked(variant="optimized")]).text(120)
    assert text.startswith("device: interpreter (no GPU): correctness is checked, no timing\n")
    assert text.count("passed, not timed") == 2
    assert text.endswith("\n2 passed\n")


def test_tables_show_options_if_they_differ_between_rows() -> None:
    rows = [record(options={"pad": 0}), record(options={"pad": 8}), record(quant="none")]
    lines = list(csv.DictReader(io.StringIO(tables.sweep_table(rows).csv())))
    assert [line["pad"] for line in lines] == ["0", "8", ""]


def test_sweep_table_never_marks_a_part_as_the_best() -> None:
    part = record(variant="optimized_gemms", time_us=10.0, pct_ceiling=500.0, role="part")
    rows = [record(pct_ceiling=50.0), record(variant="optimized", time_us=50.0, pct_ceiling=60.0), part]
    table = tables.sweep_table(rows)
    assert "* optimized " in table.text(120)
    assert "* optimized_gemms" not in table.text(120)
    lines = list(csv.DictReader(io.StringIO(table.csv())))
    assert [line["variant"] for line in lines if line["best"]] == ["optimized"]
    assert every(lines[1][name] and not lines[2][name] for name in ("gbps", "pct_bound", "vs_baseline"))
    assert lines[2]["time_us"] == "10.0"


def test_sweep_table_markdown_equals_the_expected_text() -> None:
    assert tables.sweep_table(swept()[:4]).markdown() == (
        "- device: NVIDIA H200\n"
        "\n"
        "| op | case | M | N | dtype | quant |  | variant | µs | GB/s | % ceiling | vs baseline | config |\n"
        "| --- | --- | ---: | ---: | --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- |\n"
        "| rmsnorm_fwd | te-8192x4096 | 8192 | 4096 | bfloat16 | fp8 |  | baseline | 100.00 | 1000 | 40.0 | 1.00x | - |\n"
        "| rmsnorm_fwd | te-8192x4096 | 8192 | 4096 | bfloat16 | fp8 | * | optimized | 50.00 "
        "| 2000 | 80.0 | 2.00x | block=1024 |\n"
        "| rmsnorm_fwd | llama3-70b-32768 | 32768 | 8192 | bfloat16 | none | * | baseline | 100.00 | 1000 |  | 1.00x | - |\n"
        "| rmsnorm_fwd | llama3-70b-32768 | 32768 | 8192 | bfloat16 | none |  | optimized "
        "| failed: y: 3 of 9 values differ |  |  |  | - |\n"
        "\n"
        "- 3 passed, 1 failed\n"
    )


def test_sweep_table_csv_has_full_precision_and_notes() -> None:
    lines = list(csv.DictReader(io.StringIO(tables.sweep_table(swept()).csv())))
    assert [line["best"] for line in lines] == ["", "*", "", "", "", "*"]
    wanted = {
        "op": "rmsnorm_fwd", "case": "te-8192x4096", "M": "8192", "N": "4096", "dtype": "bfloat16", "quant": "fp8",
        "policy": "cold", "variant": "optimized", "status": "passed", "time_us": "50.0", "ci_low_us": "50.0",
        "ci_high_us": "50.0", "gbps": "2000.0", "pct_bound": "80.0", "bound": "ceiling",
        "aa_floor": "", "vs_baseline": "2.0", "best": "*",
        "config": "block=1024", "device": "NVIDIA H200", "note": "",
    }  # fmt: skip
    assert lines[1] == wanted
    assert (lines[3]["status"], lines[3]["time_us"], lines[3]["note"]) == ("failed", "", "failed: y: 3 of 9 values differ")


def test_sweep_table_of_no_records_prints_no_records() -> None:
    assert tables.sweep_table([]).text().startswith("no records\n")
    assert tables.sweep_table([]).csv().count("\n") == 1


def test_brief_sweep_table_names_variants_that_skip_all_cases_below() -> None:
    skips = [failed(status="skipped", reason="has no fp8 output", variant="liger", axes={"M": m, "N": 64}) for m in (8, 16)]
    timed = [record(axes={"M": m, "N": 64}) for m in (8, 16)]
    text = tables.sweep_table([*timed, *skips], brief=True).text(120)
    assert text.count("liger") == 1
    assert text.endswith(f"2 passed, 2 skipped\nskipped in all cases: {skips[0].op} liger: {skips[0].reason}\n")
    assert tables.sweep_table([*timed, *skips]).text(120).count("liger") == 2
    assert tables.sweep_table(skips, brief=True).text(120).count("liger") == 2, "an operator keeps its last variant"


def test_ab_rows_pair_older_records_with_records_that_have_a_new_option() -> None:
    old = [record(), record(axes={"M": 1, "N": 2})]
    new = [record(50.0, options={"row_pad": 0}), record(50.0, axes={"M": 1, "N": 2}, options={"row_pad": 0})]
    assert [row.speedup for row in pairing.ab_rows(old, new)] == [2.0, 2.0]
    assert pairing.ab_rows(old, [*new, *(changed(row, options={"row_pad": 8}) for row in new)]) == []
