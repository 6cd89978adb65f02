"""The gate's answer as text, Markdown, JUnit XML and GitHub annotations.

Pure functions of a Verdict: judges nothing and writes no file. Imports the standard library, cells and verdict.
"""

import re
from xml.etree import ElementTree

from kerneltune.cells import wrapped
from kerneltune.gating.verdict import AMBIGUOUS, PASS, REGRESSION, UNUSABLE, GateRow, Outcome, Verdict

_INDENT = " " * 12
_UNIT = " µs"
_ANNOTATIONS = 10
"""GitHub shows ten errors and ten warnings of a step and drops the rest without a word."""
_ERRORS: tuple[Outcome, ...] = ("failed", "missing", "regression")
_TAGS: dict[Outcome, str] = {"missing": "error", "failed": "error", "regression": "failure", "ambiguous": "skipped"}
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def summary(verdict: Verdict) -> str:
    """The answer in one line."""
    answer = {PASS: "pass", REGRESSION: "regression", UNUSABLE: "not usable", AMBIGUOUS: "ambiguous"}[verdict.exit_code]
    rows = "row" if verdict.compared == 1 else "rows"
    return f"gate: {answer}: {verdict.reason} ({verdict.compared} {rows} compared, {verdict.count('faster')} faster)"


def gate_text(verdict: Verdict, width: int = 100) -> str:
    """The rows that did not simply pass, worst first, then note and summary; at most `width` columns where words allow it."""
    lines = []
    for row in verdict.notable:
        change, reason = "  ".join(filter(None, [_times(row), _change(row)])), f"({row.reason})" if row.reason else ""
        text = "  ".join(filter(None, [f"{row.verdict:<10}", row.label, row.variant, change, reason]))
        if len(text) > width:  # the change begins a line of its own, so that the eye finds it
            named = _wrapped(f"{row.verdict:<10}  {row.label}  {row.variant}", width)
            below = [_INDENT + "  ".join(filter(None, [change, reason]))]
            below = below if len(below[0]) <= width else [_INDENT + part for part in (change, reason) if part]
            text = "\n".join([named, *(_wrapped(part, width) for part in below if part.strip())])
        lines.append(text)
    lines += [_wrapped(f"note: {verdict.note}", width)] if verdict.note else []
    return "\n".join([*lines, _wrapped(summary(verdict), width)]) + "\n"


def gate_markdown(verdict: Verdict) -> str:
    """The same as a Markdown table under its summary."""
    lines = [f"**{_cell(summary(verdict))}**", ""]
    if verdict.note:
        lines += [f"Note: {verdict.note}", ""]
    if verdict.notable:
        lines += ["| verdict | row | case | variant | µs | slowdown | reason |", "|---|---|---|---|---:|---:|---|"]
    for row in verdict.notable:
        cells = [row.verdict, row.label, row.case, row.variant, _times(row).removesuffix(_UNIT), _change(row), row.reason]
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines).rstrip() + "\n"


def gate_junit(verdict: Verdict) -> str:
    """JUnit XML, a test case per row: regressions are failures, missing and failed rows errors, ambiguous ones skipped.

    An answer without rows is one test case with an error, so that nothing compared does not look like nothing wrong.
    """
    suite = ElementTree.Element("testsuite", name="kerneltune gate")
    for row in verdict.rows:
        test = ElementTree.SubElement(suite, "testcase", classname=row.key[0], name=_xml(f"{row.label} {row.variant}"), time="0")
        tag = _TAGS.get(row.verdict)
        text = _message(row)
        if tag is not None:
            ElementTree.SubElement(test, tag, message=_xml(f"{row.verdict}: {text}")).text = _xml(f"case {row.case}: {text}")
        elif text:
            ElementTree.SubElement(test, "system-out").text = _xml(f"{row.verdict}: {text}")
    if verdict.exit_code == UNUSABLE:
        test = ElementTree.SubElement(suite, "testcase", classname="gate", name="comparable", time="0")
        ElementTree.SubElement(test, "error", message=_xml(verdict.reason)).text = _xml(summary(verdict))
    if verdict.note:
        ElementTree.SubElement(suite, "system-out").text = _xml(f"note: {verdict.note}")
    tests = suite.findall("testcase")
    suite.set("tests", str(len(tests)))
    for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(name, str(sum(test.find(tag) is not None for test in tests)))
    root = ElementTree.Element("testsuites", name="kerneltune")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def gate_annotations(verdict: Verdict) -> str:
    """GitHub workflow commands: an error or warning for the answer and for the rows behind it, as many as GitHub shows."""
    level = {PASS: "notice", AMBIGUOUS: "warning"}.get(verdict.exit_code, "error")
    lines: dict[str, list[str]] = {"error": [], "warning": [], "notice": []}
    lines[level].append(_command(level, "kerneltune gate", summary(verdict)))
    if verdict.note:
        lines["notice"].append(_command("notice", "kerneltune gate", verdict.note))
    for row in verdict.notable:
        level = "error" if row.verdict in _ERRORS else "warning" if row.verdict == "ambiguous" else "notice"
        if row.verdict != "faster":
            lines[level].append(_command(level, f"{row.verdict}: {row.case} {row.variant}", f"{row.label}: {_message(row)}"))
    for level, found in lines.items():
        if len(found) > _ANNOTATIONS:
            hidden = len(found) - _ANNOTATIONS + 1
            found[_ANNOTATIONS - 1 :] = [_command(level, "kerneltune gate", f"and {hidden} more rows: see the log")]
    return "".join(f"{line}\n" for found in lines.values() for line in found)


def _command(level: str, title: str, message: str) -> str:
    escaped = title.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A").replace(":", "%3A").replace(",", "%2C")
    return f"::{level} title={escaped}::" + message.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _message(row: GateRow) -> str:
    return "  ".join(filter(None, [_times(row), _change(row), row.reason]))


def _change(row: GateRow) -> str:
    if row.slowdown is None or row.low is None or row.high is None:
        return ""
    return f"{row.slowdown:+.1%} [{row.low:+.1%}, {row.high:+.1%}]"


def _times(row: GateRow) -> str:
    return "" if row.old_us is None or row.new_us is None else f"{row.old_us:.4g} → {row.new_us:.4g}{_UNIT}"


def _wrapped(text: str, width: int) -> str:
    return "\n".join(wrapped(text, width, _INDENT))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _xml(text: str) -> str:
    return _NOT_IN_XML.sub("?", text)
