"""Format the gate's answer as text, Markdown, JUnit XML and GitHub annotations.

The functions take a Verdict and are pure: the module judges nothing and writes no file.
"""

import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from xml.etree import ElementTree

from kerneltune.gating.changes import us_of
from kerneltune.gating.verdict import A_PEER, AMBIGUOUS, PASS, REGRESSION, UNUSABLE, GateRow, RowVerdict, Verdict
from kerneltune.records import grouped
from kerneltune.table import Column, Row, Table
from kerneltune.wording import counted, wrapped

_INDENT = " " * 12
_UNIT = " µs"
_ANNOTATIONS = 10
"""GitHub shows ten errors and ten warnings of a step and drops all further messages silently."""
_OF_PEERS = {"regression": "slower", "ambiguous": "perhaps slower"}
"""Verdict on an own row -> the word for the same change of a peer's row, which is not judged."""
_ERRORS: tuple[RowVerdict, ...] = ("failed", "missing", "regression")
_TAGS: dict[RowVerdict, str] = {"missing": "error", "failed": "error", "regression": "failure", "ambiguous": "skipped"}
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def summary(verdict: Verdict) -> str:
    """Return the answer in one line."""
    answer = {PASS: "pass", REGRESSION: "regression", UNUSABLE: "not usable", AMBIGUOUS: "ambiguous"}[verdict.exit_code]
    counts = f" ({counted(verdict.compared, 'row')} compared, {verdict.count('faster')} faster)"
    return f"gate: {answer}: {verdict.reason}{'' if verdict.exit_code == UNUSABLE else counts}"


def gate_text(verdict: Verdict, width: int = 100) -> str:
    """Return the answer as text: rows that did not simply pass, worst first; then the notes; then the summary.

    The notes about rows are folded into a line per variant. Lines have at most `width` columns, except for a longer word.
    """
    lines = []
    for row in _counting(verdict):
        change, reason = "  ".join(filter(None, [_times(row), _change(row)])), f"({row.reason})" if row.reason else ""
        tag = f"{row.verdict:<10}"
        text = "  ".join(filter(None, [tag, row.record.label, row.record.variant, change, reason]))
        if len(text) > width:  # the change begins a new line, so that the eye finds it
            named = _wrapped(f"{tag}  {row.record.label}  {row.record.variant}", width)
            below = [_INDENT + "  ".join(filter(None, [change, reason]))]
            below = below if len(below[0]) <= width else [_INDENT + part for part in (change, reason) if part]
            text = "\n".join([named, *(_wrapped(part, width) for part in below if part.strip())])
        lines.append(text)
    lines += [_wrapped(f"failed: {failure}", width) for failure in verdict.failures]
    lines += [_wrapped(f"note: {note}", width) for note in _notes(verdict)]
    return "\n".join([*lines, _wrapped(summary(verdict), width)]) + "\n"


def gate_markdown(verdict: Verdict) -> str:
    """Return the answer as Markdown: the summary, a table of the rows of `gate_text`, then the notes."""
    names = ("verdict", "row", "case", "variant", "µs", "slowdown", "reason")
    rows = tuple(
        Row((row.verdict, *_names(row), _times(row).removesuffix(_UNIT), _change(row), row.reason)) for row in _counting(verdict)
    )
    table = Table(tuple(Column(name, digits=0 if name in ("µs", "slowdown") else None) for name in names), rows)
    said_of_all = [*(f"Failed: {failure}" for failure in verdict.failures), *(f"Note: {note}" for note in _notes(verdict))]
    notes = "\n".join(said_of_all)
    said = f"**{summary(verdict)}**".replace("|", "\\|")
    return "\n\n".join(filter(None, [said, table.markdown().rstrip() if rows else "", notes])) + "\n"


def gate_junit(verdict: Verdict) -> str:
    """Return the answer as JUnit XML, a test case per row.

    A regression is a failure, a missing or failed row is an error, and an ambiguous row is skipped. The text is valid for the
    schemas of Jenkins and of Ant. An answer without rows is a single test case with an error: without a test case, a gate that
    compared nothing would look as if it had passed.
    """
    suite = ElementTree.Element("testsuite", name="kerneltune gate", package="kerneltune", id="0", hostname="localhost", time="0")
    suite.set("timestamp", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S"))
    ElementTree.SubElement(
        ElementTree.SubElement(suite, "properties"), "property", name="exit code", value=f"{verdict.exit_code}"
    )
    said = [f"note: {note}" for note in verdict.notes]
    for row in verdict.rows:
        test = ElementTree.SubElement(
            suite, "testcase", classname=_xml(row.record.key[0]), name=_xml(f"{row.record.label} {row.record.variant}"), time="0"
        )
        tag, text = None if row.note else _TAGS.get(row.verdict), _message(row)
        if tag == "skipped":
            ElementTree.SubElement(test, tag)
        elif tag is not None:
            child = ElementTree.SubElement(test, tag, type=row.verdict, message=_xml(f"{row.verdict}: {text}"))
            child.text = _xml(f"case {row.record.case}: {text}")
        if row.verdict != "pass" and (tag is None or tag == "skipped"):
            said.append(f"{'note' if row.note else row.verdict}: {row.record.label} {row.record.variant}: {text}")
    for failure in verdict.failures:
        test = ElementTree.SubElement(suite, "testcase", classname="gate", name=_xml(failure.partition(": ")[0]), time="0")
        ElementTree.SubElement(test, "failure", type="regression", message=_xml(failure)).text = _xml(failure)
    if verdict.exit_code == UNUSABLE:
        test = ElementTree.SubElement(suite, "testcase", classname="gate", name="comparable", time="0")
        ElementTree.SubElement(test, "error", type="unusable", message=_xml(verdict.reason)).text = _xml(summary(verdict))
    ElementTree.SubElement(suite, "system-out").text = _xml("\n".join(said))
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
        level = "error" if row.verdict in _ERRORS else "warning" if row.verdict == "ambiguous" else "notice"
        if row.verdict != "faster":
            label, case, variant = _names(row)
            lines[level].append(_command(level, f"{row.verdict}: {case} {variant}", f"{label}: {_message(row)}"))
    for level, found in lines.items():
        if len(found) > _ANNOTATIONS:
            hidden = len(found) - _ANNOTATIONS + 1
            found[_ANNOTATIONS - 1 :] = [_command(level, "kerneltune gate", f"and {hidden} more rows: see the log")]
    return "".join(f"{line}\n" for found in lines.values() for line in found)


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
    said = ", ".join(f"{count} {word}" for word, count in counts.items())
    slowest = max((row.change for row in rows if row.change is not None), key=lambda change: change.slowdown, default=None)
    worst = "" if slowest is None else f"; most: {slowest.slowdown:+.1%} in {slowest.new.label}"
    return f"peer {variant}: {said}{worst}"


def _command(level: str, title: str, message: str) -> str:
    escaped = title.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={escaped}::" + message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _message(row: GateRow) -> str:
    return "  ".join(filter(None, [_times(row), _change(row), row.reason]))


def _names(row: GateRow) -> tuple[str, str, str]:
    """Return label, case and variant of a row."""
    return row.record.label, row.record.case, row.record.variant


def _change(row: GateRow) -> str:
    change = row.change
    return "" if change is None else f"{change.slowdown:+.1%} [{change.low:+.1%}, {change.high:+.1%}]"


def _times(row: GateRow) -> str:
    return "" if row.change is None else f"{us_of(row.change.old):.4g} → {us_of(row.change.new):.4g}{_UNIT}"


def _wrapped(text: str, width: int) -> str:
    return "\n".join(wrapped(text, width, _INDENT))


def _xml(text: str) -> str:
    return _NOT_IN_XML.sub("?", text)
