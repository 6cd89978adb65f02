"""Format the gate's answer as text, Markdown, JUnit XML and GitHub annotations."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from xml.etree import ElementTree

from kerneltune.gating.rows import us_of
from kerneltune.gating.verdict import A_PEER, AMBIGUOUS, PASS, REGRESSION, UNUSABLE, GateRow, RowVerdict, Verdict
from kerneltune.records import grouped
from kerneltune.reporting.tables import case_columns
from kerneltune.table import Column, Row, Table, markdown_text, values
from kerneltune.wording import counted, wrapped

_ANNOTATIONS = 10
"""GitHub shows ten errors and ten warnings of a step and drops all further messages silently."""
_OF_PEERS = {"regression": "slower", "ambiguous": "perhaps slower"}
"""Verdict on an own row -> the word for the same change of a peer's row, which is not judged."""
_TAGS: dict[RowVerdict, str] = {"missing": "error", "failed": "error", "regression": "failure", "ambiguous": "skipped"}
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def summary(verdict: Verdict) -> str:
    """Return the answer in one line."""
    answer = {PASS: "pass", REGRESSION: "fail", UNUSABLE: "not usable", AMBIGUOUS: "ambiguous"}[verdict.exit_code]
    counts = f" ({counted(verdict.compared, 'row')} compared, {verdict.count('faster')} faster)"
    return f"gate: {answer}: {verdict.reason}{counts if verdict.rows and verdict.exit_code != UNUSABLE else ''}"


def gate_text(verdict: Verdict, width: int = 100) -> str:
    """Return the answer as text: a table of the rows that did not simply pass, worst first; notes; failures; the summary.

    The notes about rows are folded into a line per variant. Lines have at most `width` columns, except for a longer word.
    """
    lines = [*(f"note: {note}" for note in _notes(verdict)), *(f"failed: {failure}" for failure in verdict.failures)]
    below = [part for line in (*lines, summary(verdict)) for part in wrapped(line, width)]
    table = _table(verdict)
    return "\n".join([*([table.text(width)] if table.rows else []), *below]) + "\n"


def gate_markdown(verdict: Verdict) -> str:
    """Return the answer as Markdown: the summary, the table of `gate_text`, failures and notes."""
    table = _table(verdict)
    lines = [*(f"Failed: {failure}" for failure in verdict.failures), *(f"Note: {note}" for note in _notes(verdict))]
    answer = f"**{markdown_text(summary(verdict))}**"
    below = "\n".join(map(markdown_text, lines))
    return "\n\n".join(filter(None, [answer, table.markdown().rstrip() if table.rows else "", below])) + "\n"


def _table(verdict: Verdict) -> Table:
    """Return a row for each row of the verdict that did not simply pass and is no note."""
    case_part, names = case_columns((row.record for row in verdict.rows), Column("op", shared=True), Column("case", rank=1))
    case_cells = {id(row): values(case_part, name) for row, name in zip(verdict.rows, names, strict=True)}
    ranked = [replace(column, rank=5 if column.shared else (4 if column.digits == 0 else column.rank)) for column in case_part]
    columns = (
        Column("verdict"), *ranked, Column("variant"), Column("µs", digits=0, rank=2), Column("slowdown", digits=0),
        Column("95 % interval", digits=0, rank=3), Column("reason", only=("markdown",)),
    )  # fmt: skip
    rows = [
        Row((row.verdict, *case_cells[id(row)], row.record.variant, *_measures(row), ""), row.reason)
        for row in _counting(verdict)
    ]
    return Table(columns, tuple(rows))


def gate_junit(verdict: Verdict) -> str:
    """Return the answer as JUnit XML, a test case per row.

    A regression is a failure, a missing or failed row is an error, and an ambiguous row is skipped. The text is valid for the
    schemas of Jenkins and of Ant. If nothing was compared, there is a test case with an error: without a test case, a gate that
    compared nothing would look as if it had passed.
    """
    suite = ElementTree.Element("testsuite", name="kerneltune gate", package="kerneltune", id="0", hostname="localhost", time="0")
    suite.set("timestamp", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S"))
    properties = ElementTree.SubElement(suite, "properties")
    ElementTree.SubElement(properties, "property", name="exit code", value=f"{verdict.exit_code}")
    remarks = [f"note: {note}" for note in verdict.notes]
    for row in verdict.rows:
        name, seconds = _xml(f"{row.record.label} {row.record.variant}"), f"{(row.record.time_us or 0.0) / 1e6:.9f}"
        test = ElementTree.SubElement(suite, "testcase", classname=_xml(row.record.op), name=name, time=seconds)
        tag, text = None if row.note else _TAGS.get(row.verdict), _message(row)
        if tag == "skipped":
            ElementTree.SubElement(test, tag)
        elif tag is not None:
            child = ElementTree.SubElement(test, tag, type=row.verdict, message=_xml(f"{row.verdict}: {text}"))
            child.text = _xml(f"case {row.record.case}: {text}")
        if row.verdict != "pass" and (tag is None or tag == "skipped"):
            remarks.append(f"{'note' if row.note else row.verdict}: {row.record.label} {row.record.variant}: {text}")
    for kind, failure in [*(("stale", line) for line in verdict.stale), *(("regression", line) for line in verdict.slower)]:
        test = ElementTree.SubElement(suite, "testcase", classname="gate", name=_xml(failure.partition(": ")[0]), time="0")
        ElementTree.SubElement(test, "failure", type=kind, message=_xml(failure)).text = _xml(failure)
    if verdict.exit_code == UNUSABLE or not (verdict.rows or verdict.failures):
        test = ElementTree.SubElement(suite, "testcase", classname="gate", name="comparable", time="0")
    if verdict.exit_code == UNUSABLE:
        ElementTree.SubElement(test, "error", type="unusable", message=_xml(verdict.reason)).text = _xml(summary(verdict))
    ElementTree.SubElement(suite, "system-out").text = _xml("\n".join(remarks))
    ElementTree.SubElement(suite, "system-err")
    tests = suite.findall("testcase")
    suite.set("tests", str(len(tests)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(test.find(tag) is not None for test in tests)))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def gate_annotations(verdict: Verdict) -> str:
    """Return GitHub workflow commands: an error or warning for the answer and for its rows, as many as GitHub shows."""
    level = {PASS: "notice", AMBIGUOUS: "warning"}.get(verdict.exit_code, "error")
    lines: dict[str, list[str]] = {"error": [], "warning": [], "notice": []}
    lines[level].append(_command(level, "kerneltune gate", summary(verdict)))
    lines["error"] += [_command("error", "kerneltune gate", failure) for failure in verdict.failures]
    lines["notice"] += [_command("notice", "kerneltune gate", note) for note in _notes(verdict)]
    for row in _counting(verdict):
        level = {"error": "error", "failure": "error", "skipped": "warning"}.get(_TAGS.get(row.verdict, ""), "notice")
        if row.verdict != "faster":
            title = f"{row.verdict}: {row.record.case} {row.record.variant}"
            lines[level].append(_command(level, title, f"{row.record.label}: {_message(row)}"))
    text = ""
    for level, commands in lines.items():
        if len(commands) > _ANNOTATIONS:
            hidden = len(commands) - _ANNOTATIONS + 1
            commands[_ANNOTATIONS - 1 :] = [_command(level, "kerneltune gate", f"and {hidden} more rows: see the log")]
        text += "".join(f"{command}\n" for command in commands)
    return text


def error_annotation(text: str) -> str:
    """Return the GitHub workflow command of an error that left no verdict."""
    return _command("error", "kerneltune gate", text)


def _counting(verdict: Verdict) -> list[GateRow]:
    """Return the rows that did not simply pass and are not notes."""
    return [row for row in verdict.notable if not row.note]


def _notes(verdict: Verdict) -> list[str]:
    """Return the verdict's notes, then a line per variant whose rows are notes."""
    groups = grouped([row for row in verdict.notable if row.note], lambda row: (row.note, row.record.variant))
    return [*verdict.notes, *(_folded(variant, note, rows) for (note, variant), rows in groups.items())]


def _folded(variant: str, note: str, rows: Sequence[GateRow]) -> str:
    """Return a line for the rows of a variant: the number of rows per verdict, and the slowest row."""
    if note != A_PEER:
        return f"{variant}: {len(rows)} failed, in the baseline as well"
    counts = Counter(_OF_PEERS.get(row.verdict, row.verdict) for row in rows)
    verdicts = ", ".join(f"{count} {word}" for word, count in counts.items())
    slowest = max((row.change for row in rows if row.change is not None), key=lambda change: change.slowdown, default=None)
    worst = "" if slowest is None else f"; most: {slowest.slowdown:+.1%} in {slowest.new.label}"
    return f"peer {variant}: {verdicts}{worst}"


def _command(level: str, title: str, message: str) -> str:
    escaped = title.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={escaped}::" + message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _message(row: GateRow) -> str:
    times, slowdown, interval = _measures(row)
    return "  ".join(filter(None, [times and f"{times} µs", f"{slowdown} {interval}".strip(), row.reason]))


def _measures(row: GateRow) -> tuple[str, str, str]:
    """Return the two times, the slowdown and its interval; empty for a row that was not compared."""
    change = row.change
    if change is None:
        return "", "", ""
    interval = f"[{change.low:+.1%}, {change.high:+.1%}]"
    old, new = (f"{us:.4g}" if us < 1e4 else f"{us:.0f}" for us in (us_of(change.old), us_of(change.new)))
    return f"{old} → {new}", f"{change.slowdown:+.1%}", interval


def _xml(text: str) -> str:
    return _NOT_IN_XML.sub("?", text)
