"""The gate's answer in every form: exact text at two widths, XML that parses, escaped annotations."""

from datetime import datetime
from typing import Any
from xml.etree import ElementTree

import pytest
from gate_rows import LABEL, record, untimed

from kerneltune.gating.report import gate_annotations, gate_junit, gate_markdown, gate_text
from kerneltune.gating.verdict import GateRow, Verdict, gate

OLD = [record(), record(quant="none"), record(quant="fp8_t"), record(variant="pr593"), record(variant="eager")]
NEW = [record(103.5), record(110.0, quant="none"), record(90.0, quant="fp8_t"), record(variant="pr593")]
ANSWER = gate(OLD, [*NEW, untimed("failed", "y: 1 % of <words> | differ\x00", variant="eager")], 0.03)
SUMMARY = "gate: fail: 1 failed, 1 regression (4 rows compared, 1 faster)"


def test_gate_text_has_rows_that_did_not_pass_and_the_summary() -> None:
    assert gate_text(ANSWER, 126) == (
        "all rows: op rmsnorm_fwd, dtype bfloat16\n"
        "\n"
        "verdict    case         quant    M    N variant            µs slowdown   95 % interval\n"
        "failed     te-8192x4096 fp8   8192 4096 eager  y: 1 % of <words> | differ\\x00\n"
        "regression te-8192x4096 none  8192 4096 optimized   100 → 110   +10.0% [+9.0%, +11.1%]  "
        "at least 9.0% slower, tolerated 3.0%;\n"
        f"{' ' * 88}one process a side\n"
        "ambiguous  te-8192x4096 fp8   8192 4096 optimized 100 → 103.5    +3.5%  [+2.5%, +4.5%]  "
        "at least 2.5% slower, tolerated 3.0%:\n"
        f"{' ' * 88}measure more; one process a side\n"
        "faster     te-8192x4096 fp8_t 8192 4096 optimized    100 → 90   -10.0% [-10.9%, -9.0%]\n"
        "\n"
        f"{SUMMARY}\n"
    )


def test_gate_text_when_narrow_hides_the_interval_last_and_puts_reasons_below() -> None:
    text = gate_text(ANSWER, 72)
    assert max(map(len, text.splitlines())) <= 72
    assert (
        "-- quant none\n"
        "regression te-8192x4096 optimized   100 → 110   +10.0% [+9.0%, +11.1%]\n"
        "        at least 9.0% slower, tolerated 3.0%; one process a side\n"
    ) in text
    assert "not shown in 72 columns: M, N; a wider terminal shows all\n" in text
    assert "not shown in 62 columns: M, N, 95 % interval; " in gate_text(ANSWER, 62)


def test_gate_text_lists_and_counts_rows_slower_within_the_margin() -> None:
    answer = gate([record(ci_low_us=99.9, ci_high_us=100.1)], [record(102.5, ci_low_us=102.4, ci_high_us=102.6)], 0.03)
    for text in (gate_text(answer, 160), gate_markdown(answer)):
        assert "gate: pass: 1 slower, tolerated (1 row compared, 0 faster)" in text
        assert "+2.5%" in text
        assert "[+2.3%, +2.7%]" in text


def test_gate_text_of_a_pass_a_missing_row_and_no_records() -> None:
    assert gate_text(gate([record()], [record()], 0.03)) == "gate: pass: no row is slower (1 row compared, 0 faster)\n"
    assert gate_markdown(gate([record()], [record()], 0.03)) == "**gate: pass: no row is slower (1 row compared, 0 faster)**\n"
    kept = record(quant="none")
    lines = gate_text(gate([record(), kept], [kept], 0.03), 120).splitlines()
    assert [" ".join(line.split()) for line in lines[-3:]] == [
        "missing rmsnorm_fwd te-8192x4096 bfloat16 fp8 8192 4096 optimized not in the new records",
        "",
        "gate: fail: 1 missing (1 row compared, 0 faster)",
    ]
    assert gate_text(gate([record()], [], 0.03)) == ("gate: not usable: nothing compared: new has no records\n")


def test_gate_markdown_has_rows_that_did_not_pass_and_the_summary() -> None:
    assert gate_markdown(ANSWER) == (
        f"**{SUMMARY}**\n"
        "\n"
        "| verdict | op | case | dtype | quant | M | N | variant | µs | slowdown | 95 % interval | reason |\n"
        "| --- | --- | --- | --- | --- | ---: | ---: | --- | ---: | ---: | ---: | --- |\n"
        "| failed | rmsnorm_fwd | te-8192x4096 | bfloat16 | fp8 | 8192 | 4096 | eager |  |  |  "
        "| y: 1 % of \\<words> \\| differ\\x00 |\n"
        "| regression | rmsnorm_fwd | te-8192x4096 | bfloat16 | none | 8192 | 4096 | optimized | 100 → 110 | +10.0% "
        "| [+9.0%, +11.1%] | at least 9.0% slower, tolerated 3.0%; one process a side |\n"
        "| ambiguous | rmsnorm_fwd | te-8192x4096 | bfloat16 | fp8 | 8192 | 4096 | optimized | 100 → 103.5 | +3.5% "
        "| [+2.5%, +4.5%] | at least 2.5% slower, tolerated 3.0%: measure more; one process a side |\n"
        "| faster | rmsnorm_fwd | te-8192x4096 | bfloat16 | fp8_t | 8192 | 4096 | optimized | 100 → 90 | -10.0% "
        "| [-10.9%, -9.0%] |  |\n"
    )


def test_gate_text_prints_times_of_steps_in_whole_microseconds() -> None:
    text = gate_text(gate([record(238938.0)], [record(9999.4)], 0.03), 120)
    assert "238938 → 9999 " in text


def test_gate_markdown_escapes_names_and_reasons() -> None:
    """GitHub drops tags that it does not know, and shows `__main__` in bold without its underscores."""
    op = "__main__.double-60b66e0e"
    text = gate_markdown(gate([record(op=op)], [untimed("failed", "expected <class 'int'>", op=op)], 0.03))
    assert r"| \_\_main\_\_.double-60b66e0e |" in text
    assert r"expected \<class 'int'>" in text


def parsed(verdict: Verdict) -> ElementTree.Element:
    (suite,) = ElementTree.fromstring(gate_junit(verdict).encode())
    return suite


def test_gate_junit_has_a_test_case_per_row() -> None:
    suite = parsed(ANSWER)
    assert {k: suite.get(k) for k in ("tests", "failures", "errors", "skipped")} == {
        "tests": "5",
        "failures": "1",
        "errors": "1",
        "skipped": "1",
    }
    tests = {test.get("name"): [child.tag for child in test] for test in suite.findall("testcase")}
    assert tests == {
        f"{LABEL} optimized": ["skipped"],
        "rmsnorm_fwd M=8192 N=4096 bfloat16 none cold optimized": ["failure"],
        "rmsnorm_fwd M=8192 N=4096 bfloat16 fp8_t cold optimized": [],
        f"{LABEL} pr593": [],
        f"{LABEL} eager": ["error"],
    }
    assert {test.get("classname") for test in suite.findall("testcase")} == {"rmsnorm_fwd"}
    error = suite.find("testcase/error")
    assert error is not None
    assert error.get("message") == "failed: y: 1 % of <words> | differ\\x00"
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert (
        failure.get("message")
        == "regression: 100 → 110 µs  +10.0% [+9.0%, +11.1%]  at least 9.0% slower, tolerated 3.0%; one process a side"
    )


def test_gate_junit_is_valid_under_the_schemas_of_ant_and_jenkins() -> None:
    root = ElementTree.fromstring(gate_junit(ANSWER).encode())
    assert root.attrib == {}  # Ant's schema gives the root none
    (suite,) = root
    assert set(suite.attrib) == {
        "name", "package", "id", "hostname", "timestamp", "time", "tests", "failures", "errors", "skipped",
    }  # fmt: skip
    assert datetime.fromisoformat(suite.attrib["timestamp"]).tzinfo is None
    assert len(suite.attrib["timestamp"]) == 19
    order = [child.tag for child in suite]
    assert order == ["properties", *["testcase"] * 5, "system-out", "system-err"]
    for test in suite.findall("testcase"):
        assert set(test.attrib) == {"classname", "name", "time"}
        assert len(test) <= 1
        for child in test:
            assert child.tag in ("error", "failure", "skipped")
            assert set(child.attrib) in ({"type", "message"}, set())
            assert (child.tag == "skipped") == (not child.attrib)


def test_gate_reports_in_every_format_count_no_note_as_a_row() -> None:
    old, new = [record(), record(variant="eager", role="peer")], [record(), record(150.0, variant="eager", role="peer")]
    answer = gate(old, new, 0.03)
    note = f"peer eager: 1 slower; most: +50.0% in {LABEL}"
    assert gate_text(answer, 200).splitlines()[0] == f"note: {note}"
    assert gate_markdown(answer).endswith(f"Note: {note}\n")
    assert gate_annotations(answer).splitlines()[1] == f"::notice title=kerneltune gate::{note.replace('%', '%25')}"
    suite = parsed(answer)
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("0", "0", "0")
    assert (suite.findtext("system-out") or "").startswith(f"note: {LABEL} eager: 100 → 150 µs")


def test_gate_text_prints_notes_per_variant_after_judged_rows() -> None:
    sizes = [{"M": size, "N": 64} for size in (1, 2, 3)]
    old = [record(quant="none"), *(record(variant="eager", role="peer", axes=axes) for axes in sizes)]
    broken = [untimed("failed", variant="split", axes=axes) for axes in sizes]
    new = [record(150.0, quant="none"), record(120.0, variant="eager", role="peer", axes=sizes[0]), *broken]
    lines = gate_text(gate([*old, *broken], new, 0.03), 200).splitlines()
    assert lines[1].startswith("regression ")
    assert sorted(lines[3:5]) == [
        "note: peer eager: 2 missing, 1 slower; most: +20.0% in rmsnorm_fwd M=1 N=64 bfloat16 fp8 cold",
        "note: split: 3 failed, in the baseline as well",
    ]
    assert len(lines) == 6


def test_gate_junit_of_nothing_compared_has_an_error() -> None:
    suite = parsed(gate([record()], [], 0.03))
    assert (suite.get("tests"), suite.get("errors")) == ("1", "1")
    error = suite.find("testcase/error")
    assert error is not None
    assert error.get("message") == "nothing compared: new has no records"


def test_gate_annotations_escape_names_and_reasons() -> None:
    assert gate_annotations(ANSWER).splitlines() == [
        f"::error title=kerneltune gate::{SUMMARY}",
        f"::error title=failed%3A te-8192x4096 eager::{LABEL}: y: 1 %25 of <words> | differ\\x00",
        "::error title=regression%3A te-8192x4096 optimized::rmsnorm_fwd M=8192 N=4096 bfloat16 none cold: "
        "100 → 110 µs  +10.0%25 [+9.0%25, +11.1%25]  at least 9.0%25 slower, tolerated 3.0%25; one process a side",
        f"::warning title=ambiguous%3A te-8192x4096 optimized::{LABEL}: "
        "100 → 103.5 µs  +3.5%25 [+2.5%25, +4.5%25]  at least 2.5%25 slower, tolerated 3.0%25: measure more; one process a side",
    ]


@pytest.mark.parametrize(
    ("new", "level"), [(record(), "notice"), (record(103.5), "warning"), (record(device="NVIDIA H100"), "error")]
)
def test_gate_annotations_begin_with_the_level_of_the_verdict(new: Any, level: str) -> None:
    assert gate_annotations(gate([record()], [new], 0.03)).startswith(f"::{level} title=kerneltune gate::gate: ")


def test_gate_annotations_beyond_10_are_counted() -> None:
    rows = tuple(GateRow(record(variant="a,b", case=f"c:{i}"), "missing", reason="gone") for i in range(30))
    lines = gate_annotations(Verdict(rows, 1, "30 missing")).splitlines()
    assert len(lines) == 10
    assert lines[1] == f"::error title=missing%3A c%3A0 a%2Cb::{LABEL}: gone"
    assert lines[-1] == "::error title=kerneltune gate::and 22 more rows: see the log"


def test_gate_text_of_rows_that_the_baseline_lacks_is_a_note() -> None:
    renamed = [record(variant=name) for name in ("fast", "split")]
    assert gate_text(gate([record()], [record(), *renamed], 0.03)).startswith(
        "note: rows that the baseline lacks, not judged: 1 of rmsnorm_fwd fast, 1 of rmsnorm_fwd split\n"
    )
    assert gate([record()], [record(), untimed("skipped", variant="fast")], 0.03).notes == ()


def test_gate_reports_in_every_format_have_the_note() -> None:
    verdict = gate([record(unit="a")], [record(unit="b")], 0.03)
    note = "another NVIDIA H200: rows may differ by up to about 5.5 %"
    summary = "gate: pass: no row is slower (1 row compared, 0 faster)"
    assert gate_text(verdict, 80) == f"note: {note}\n{summary}\n"
    assert gate_markdown(verdict) == f"**{summary}**\n\nNote: {note}\n"
    suite = parsed(verdict)
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "0", "0")
    assert suite.findtext("system-out") == f"note: {note}"
    assert gate_annotations(verdict).splitlines() == [
        f"::notice title=kerneltune gate::{summary}",
        f"::notice title=kerneltune gate::{note.replace('%', '%25')}",
    ]
