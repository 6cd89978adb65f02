"""Tables that are declared once, as columns and rows of plain values, and written as text, Markdown, CSV or values for a page.

Text fits a width: columns of the highest rank are hidden first, and a line names them; then cells wrap in columns that may. Pure;
knows nothing of records.
"""

import csv
import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

Value = str | float | int | bool | None

_GAP, _WIDE_GAP = 1, 2
"""Blanks between columns, and between columns of which some wrap, where there is room."""
_LEAST_ROOM, _NOTE_INDENT, _NOTE_LINES = 30, 8, 3
_LEAST_COLUMN = 12
"""Characters to which a column that wraps is narrowed before the first one is."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading, with the unit: `A µs`.
        digits: decimals of its numbers in print; None for text. CSV holds the unrounded value.
        suffix: behind every printed number: `x`, `%`.
        rank: 0 is always shown; of the others the highest is hidden first where a line is too wide, or said on lines of their own
            where it is shared.
        key: its name in CSV and on a page; the heading in lower case if empty.
        shared: is said once above a text table in which all rows have one value of it.
        only: the forms that have it: `text`, `markdown`, `csv`, `page`; all if empty.
        wraps: whether cells may take several lines where a line is too wide.
    """

    name: str
    digits: int | None = None
    suffix: str = ""
    rank: int = 0
    key: str = ""
    shared: bool = False
    only: tuple[str, ...] = ()
    wraps: bool = False

    @property
    def is_text(self) -> bool:
        """Return whether cells are set to the left."""
        return self.digits is None

    @property
    def csv_name(self) -> str:
        """The column's name in CSV."""
        return self.key or self.name.replace(" ", "_")

    def cell(self, value: Value) -> str:
        """Return a value in print; empty for None."""
        if value is None:
            return ""
        if self.digits is None or isinstance(value, str | bool):
            return printable(" ".join(str(value).split()))
        return number(value, self.digits) + self.suffix


@dataclass(frozen=True, slots=True)
class Row:
    """A row: a value per column, and a note that stands in place of the numbers where there are none."""

    values: tuple[Value, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Columns, rows, lines above and below.

    Attributes:
        repeated: so many leading columns are left blank in text where they say what the row above says.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    head: tuple[str, ...] = ()
    foot: tuple[str, ...] = ()
    repeated: int = 0
    title: str = field(default="", kw_only=True)

    def text(self, width: int = 100, all_shown_by: str = "a wider terminal") -> str:
        """Return lines above, rows in aligned columns, lines below, of at most `width` columns where words allow it.

        all_shown_by: what shows the columns that are hidden here.
        """
        shown = self._of("text")
        shared = [i for i in shown if self.columns[i].shared and self._one_value(i)]
        shown, headings, hidden = self._fitting([i for i in shown if i not in shared], width)
        lines = [part for line in self.head for part in wrapped(line, width)]
        if shared:
            lines += wrapped(f"all rows: {self._said(self.rows[0], shared)}", width)
        lines += [""] if lines else []
        lines += self._grid(shown, headings, width)
        below = [part for line in self.foot for part in wrapped(line, width)]
        if hidden:
            names = ", ".join(self.columns[i].name for i in hidden)
            below += wrapped(f"not shown in {width} columns: {names}; {all_shown_by} shows all", width)
        return "\n".join([*([f"{self.title}", ""] if self.title else []), *lines, *([""] if below else []), *below]) + "\n"

    def markdown(self) -> str:
        """Return a Markdown table below its lines."""
        shown = self._of("markdown")
        title = [f"### {self.title}", ""] if self.title else []
        lines = [*title, *(f"- {_escaped(line.strip())}" for line in self.head), *([""] if self.head else [])]
        lines.append(_pipe(self.columns[i].name for i in shown))
        lines.append(_pipe("---" if self.columns[i].is_text else "---:" for i in shown))
        for row in self.rows:
            cells = [self.columns[i].cell(row.values[i]) for i in shown]
            if row.note:  # in the first of the empty cells, or in the last one, where that is for words
                empty = [at for at, i in enumerate(shown) if not self.columns[i].is_text and not cells[at]]
                for_words = self.columns[shown[-1]].is_text and not cells[-1]
                place = empty[0] if empty and not for_words else len(cells) - 1
                cells[place] = printable(" ".join(f"{cells[place]} {row.note}".split()))
            lines.append(_pipe(map(_escaped, cells)))
        foot = [f"- {_escaped(line.strip())}" for line in self.foot]
        return "\n".join([*lines, *([""] if foot else []), *foot]) + "\n"

    def csv(self) -> str:
        """Return a heading and a line per row, values unrounded; the note is the last column."""
        shown = self._of("csv")
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*(self.columns[i].csv_name for i in shown), "note"])
        for row in self.rows:
            writer.writerow(["" if row.values[i] is None else row.values[i] for i in shown] + [" ".join(row.note.split())])
        return text.getvalue()

    def render(self, style: str, width: int = 100) -> str:
        """Return the table as `text`, `markdown` or `csv`."""
        if style == "text":
            return self.text(width, "a wider terminal or --format markdown|csv")
        return self.markdown() if style == "markdown" else self.csv()

    def page(self) -> dict[str, Any]:
        """Return what a page shows: headings, printed cells, lines above and below."""
        shown = self._of("page")
        return {
            "title": self.title,
            "head": list(self.head),
            "foot": list(self.foot),
            "columns": [{"name": self.columns[i].name, "text": self.columns[i].is_text} for i in shown],
            "rows": [{"cells": [self.columns[i].cell(row.values[i]) for i in shown], "note": row.note} for row in self.rows],
        }

    def _of(self, form: str) -> list[int]:
        """Return the columns of a form."""
        return [i for i, column in enumerate(self.columns) if not column.only or form in column.only]

    def _said(self, row: Row, columns: Iterable[int]) -> str:
        """Return some cells of a row with their headings in words."""
        return ", ".join(f"{self.columns[i].name} {self.columns[i].cell(row.values[i])}" for i in columns)

    def _one_value(self, index: int) -> bool:
        return len(self.rows) > 1 and len({row.values[index] for row in self.rows}) == 1

    def _fitting(self, shown: list[int], width: int) -> tuple[list[int], list[int], list[int]]:
        """Return the columns that fit, those that are said on lines of their own, and those that are hidden; no empty column."""
        shown = [i for i in shown if self.columns[i].rank == 0 or any(row.values[i] not in (None, "") for row in self.rows)]
        headings: list[int] = []
        hidden: list[int] = []
        while self._least_span(shown) > width:
            rank = max((self.columns[i].rank for i in shown), default=0)
            for i in [i for i in shown if self.columns[i].rank == rank and (rank or self.columns[i].shared)]:
                (headings if self.columns[i].shared else hidden).append(i)
                shown.remove(i)
            if not rank:
                break
        return shown, sorted(headings), sorted(hidden)

    def _least_span(self, shown: Sequence[int]) -> int:
        return sum(self._least_widths(shown)) + _GAP * (len(shown) - 1)

    def _cells(self, index: int) -> list[str]:
        """Return a column in print, its heading first."""
        return [self.columns[index].name, *(self.columns[index].cell(row.values[index]) for row in self.rows)]

    def _least_widths(self, shown: Sequence[int]) -> list[int]:
        """Return the width of each column; of one that wraps, that of its longest word."""
        return [
            max(len(part) for cell in self._cells(i) for part in (cell.split() or [""] if self.columns[i].wraps else [cell]))
            for i in shown
        ]

    def _widths(self, shown: Sequence[int], room: int) -> list[int]:
        """Return the widths of columns in a room: what is left is shared out to those that wrap.

        Where not even the longest words fit, the widest columns that wrap are narrower, the first one last.
        """
        widths = self._least_widths(shown)
        wrapping = [at for at, i in enumerate(shown) if self.columns[i].wraps]
        for narrowed, least in (([at for at in wrapping if at], _LEAST_COLUMN), (wrapping, _LEAST_COLUMN), (wrapping, 1)):
            while sum(widths) > room and max((widths[at] for at in narrowed), default=least) > least:
                widths[max(narrowed, key=widths.__getitem__)] -= 1
        wanted = [max(map(len, self._cells(i))) - least for i, least in zip(shown, widths, strict=True)]
        left = max(0, room - sum(widths))
        for nth, at in enumerate(sorted(range(len(widths)), key=wanted.__getitem__)):
            more = min(wanted[at], left // (len(widths) - nth))
            widths[at] += more
            left -= more
        return widths

    def _grid(self, shown: Sequence[int], headings: Sequence[int], width: int) -> list[str]:
        """Return the heading and the lines of every row; what `headings` say stands on a line of its own where it changes."""
        has_room = self._least_span(shown) + (_WIDE_GAP - _GAP) * (len(shown) - 1) <= width
        gap = _WIDE_GAP if has_room and any(self.columns[i].wraps for i in shown) else _GAP
        widths = self._widths(shown, width - gap * (len(shown) - 1))
        lines = self._lines([self.columns[i].name for i in shown], shown, widths, gap)
        before: Row | None = None
        for row in self.rows:
            if headings and (before is None or any(row.values[i] != before.values[i] for i in headings)):
                lines += wrapped(f"-- {self._said(row, headings)}", width)
                before = None
            cells = [self.columns[i].cell(row.values[i]) for i in shown]
            if before is not None and self.repeated and row.values[: self.repeated] == before.values[: self.repeated]:
                cells = ["" if i < self.repeated else cell for i, cell in zip(shown, cells, strict=True)]
            before = row
            *above, last = self._lines(cells, shown, widths, gap)
            lines += [*above, *(_noted(last, row.note, width) if row.note else [last])]
        return lines

    def _lines(self, cells: Sequence[str], shown: Sequence[int], widths: Sequence[int], gap: int) -> list[str]:
        """Return a row on as many lines as its cells need."""
        folded = [_folded(cell, columns) for cell, columns in zip(cells, widths, strict=True)]
        sides = [str.ljust if self.columns[i].is_text else str.rjust for i in shown]
        return [
            (" " * gap).join(side(part, columns) for side, part, columns in zip(sides, parts, widths, strict=True)).rstrip()
            for parts in zip_longest(*folded, fillvalue="")
        ]


def _folded(cell: str, columns: int) -> list[str]:
    """Split a cell into lines of at most `columns`: between words, else behind `.`, `_` or `-`, else anywhere."""
    if len(cell) <= columns:
        return [cell]
    lines: list[str] = []
    for line in wrapped(cell, columns, ""):
        lines.append("")
        for part in re.split("(?<=[._-])", line) if len(line) > columns else [line]:
            if lines[-1] and len(lines[-1]) + len(part) > columns:
                lines.append("")
            lines[-1] += part
    return [part for line in lines for part in textwrap.wrap(line, columns, break_on_hyphens=False)]


def _noted(line: str, note: str, width: int) -> list[str]:
    """Return a row's line with its note behind the last cell, or below where there is little room."""
    left = line + "  "
    beside = width - len(left) >= _LEAST_ROOM
    indent = " " * (len(left) if beside else _NOTE_INDENT)
    words = textwrap.wrap(
        printable(" ".join(note.split())),
        width - len(indent),
        max_lines=_NOTE_LINES,
        placeholder=" …",
        break_on_hyphens=False,
    )
    lines = [indent + line for line in words]
    return [left + words[0], *lines[1:]] if beside else [line, *lines]


def joined(tables: Iterable[Table], style: str, width: int) -> str:
    """Return tables one below the other; CSV has one heading where they have the same columns."""
    found = list(tables)
    texts = [table.render(style, width) for table in found]
    if style == "csv" and all(a.columns == b.columns for a, b in pairwise(found)):
        return "".join([*texts[:1], *(text.partition("\n")[2] for text in texts[1:])])
    return "\n".join(texts)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _pipe(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def printable(text: str) -> str:
    """Return the text with control characters, escape sequences and marks of writing direction as visible escapes."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the ratio; None where one of the two is not known."""
    return None if numerator is None or denominator is None else numerator / denominator


def number(value: float | None, digits: int) -> str:
    """Write a number with so many digits behind the point, and no minus before nothing but zeros; empty for None."""
    return "" if value is None else f"{value:z.{digits}f}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 row`, `3 rows`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def pairs(values: Mapping[str, object]) -> str:
    """Return values with their names: `block=1024 warps=4`."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def wrapped(text: str, width: int, indent: str = "  ") -> list[str]:
    """Return words on lines of at most `width` columns, from the second on with an indent; longer words stay whole."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
