"""Declare a table once, as columns and rows of plain values, and write it as text, Markdown, CSV or values for a page.

Text fits a width: cells wrap in columns that may, and columns of the highest rank are hidden first.
"""

import csv
import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

CellValue = str | float | int | bool | None

_LEAST_ROOM, _NOTE_INDENT, _NOTE_LINES = 30, 8, 3
_NUMBER = re.compile(r"[-+]?[0-9.,]*( ?%|x)?")
"""A cell that is a number, or that stands for a missing number."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Column:
    """Describe a column of a table.

    Attributes:
        name: the heading, with the unit: `A µs`.
        digits: decimals of printed numbers; None for text. CSV holds the unrounded value.
        suffix: characters behind every printed number: `x`, `%`.
        rank: 0 is always shown; where a line is too wide, the columns of the highest rank are hidden first. A shared column is
            not hidden: a line above the rows states its value.
        key: the name in CSV and on a page; the heading in lower case if empty.
        shared: whether a line above a text table states the value, where all rows have the same value.
        only: the forms that have the column: `text`, `markdown`, `csv`, `page`; all forms if empty.
        wraps: whether a cell may take several lines.
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
        """Return whether cells are left-aligned."""
        return self.digits is None

    @property
    def csv_name(self) -> str:
        """Return the column's name in CSV."""
        return self.key or self.name.replace(" ", "_")

    def cell(self, value: CellValue) -> str:
        """Return a value in print, with no minus before zeros alone; empty for None."""
        if value is None:
            return ""
        if self.digits is None or isinstance(value, str | bool):
            return printable(" ".join(str(value).split()))
        return f"{value:z.{self.digits}f}{self.suffix}"


@dataclass(frozen=True, slots=True)
class Row:
    """Hold a row: a value per column, and a note, such as the reason why values are missing."""

    values: tuple[CellValue, ...]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Hold columns, rows, and the lines above and below them.

    Attributes:
        repeated: leading columns that are left blank in text where a row repeats the values of the row above.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    head: tuple[str, ...] = ()
    foot: tuple[str, ...] = ()
    repeated: int = 0
    title: str = field(default="", kw_only=True)

    @classmethod
    def of_texts(cls, head: Sequence[str], rows: Iterable[Sequence[str]]) -> "Table":
        """Make a table of printed cells that may wrap; columns of numbers are right-aligned."""
        lines = [Row(tuple(row)) for row in rows]
        columns = []
        for name, *cells in zip(head, *(line.values for line in lines), strict=True):
            is_number = all(map(_NUMBER.fullmatch, cells)) and bool(re.search("[0-9]", "".join(cells)))
            columns.append(Column(name, digits=0 if is_number else None, wraps=True))
        return cls(tuple(columns), tuple(lines))

    def text(self, width: int = 100, all_shown_by: str = "a wider terminal") -> str:
        """Return aligned columns of at most `width` characters, where words allow it, between the lines above and below.

        all_shown_by: the means that shows columns which are hidden here.
        """
        shown = [
            i for i in self._of("text") if self.columns[i].rank == 0 or any(row.values[i] not in (None, "") for row in self.rows)
        ]
        shared = [i for i in shown if self.columns[i].shared and len({row.values[i] for row in self.rows}) == 1 < len(self.rows)]
        shown, stated, hidden = self._fitting([i for i in shown if i not in shared], width)
        names = ", ".join(self.columns[i].name for i in hidden)
        above = [*self.head, *([f"all rows: {self._stated(self.rows[0], shared)}"] if shared else [])]
        below = [*self.foot, *([f"not shown in {width} columns: {names}; {all_shown_by} shows all"] if hidden else [])]
        around = ["\n".join(part for line in lines for part in wrapped(line, width)) for lines in (above, below)]
        parts = (self.title, around[0], "\n".join(self._grid(shown, stated, width)), around[1])
        return "\n\n".join(filter(None, parts)) + "\n"

    def markdown(self) -> str:
        """Return a Markdown table below its lines."""
        shown = self._of("markdown")
        lines = [_pipe(self.columns[i].name for i in shown), _pipe("---" if self.columns[i].is_text else "---:" for i in shown)]
        for row in self.rows:
            cells = self._cells(row, shown)
            if row.note:  # in the last column if its cell is an empty text, else in place of the first missing number
                empty = [at for at, i in enumerate(shown) if not self.columns[i].is_text and not cells[at]]
                is_last = not empty or (self.columns[shown[-1]].is_text and not cells[-1])
                at = len(cells) - 1 if is_last else empty[0]
                cells[at] = printable(" ".join(f"{cells[at]} {row.note}".split()))
            lines.append(_pipe(cell.replace("|", "\\|") for cell in cells))
        listed = ["\n".join("- " + line.strip().replace("|", "\\|") for line in part) for part in (self.head, self.foot)]
        parts = [f"### {self.title}" if self.title else "", listed[0], "\n".join(lines), listed[1]]
        return "\n\n".join(part for part in parts if part) + "\n"

    def csv(self) -> str:
        """Return a heading and a line per row, values unrounded; the note is the last column."""
        shown = self._of("csv")
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*(self.columns[i].csv_name for i in shown), "note"])
        writer.writerows([*(row.values[i] for i in shown), " ".join(row.note.split())] for row in self.rows)
        return text.getvalue()

    def render(self, style: str, width: int = 100) -> str:
        """Return the table as `text`, `markdown` or `csv`."""
        if style == "text":
            return self.text(width, "a wider terminal or --format markdown|csv")
        return self.markdown() if style == "markdown" else self.csv()

    def page(self) -> dict[str, Any]:
        """Return the values of a page: headings, printed cells, lines above and below."""
        shown = self._of("page")
        columns = [{"name": self.columns[i].name, "text": self.columns[i].is_text} for i in shown]
        rows = [{"cells": self._cells(row, shown), "note": row.note} for row in self.rows]
        return {"title": self.title, "head": list(self.head), "foot": list(self.foot), "columns": columns, "rows": rows}

    def _of(self, form: str) -> list[int]:
        """Return the columns of a form."""
        return [i for i, column in enumerate(self.columns) if not column.only or form in column.only]

    def _stated(self, row: Row, columns: Iterable[int]) -> str:
        """Return some cells of a row with their headings: `dtype bfloat16, quant fp8`."""
        return ", ".join(f"{self.columns[i].name} {self.columns[i].cell(row.values[i])}" for i in columns)

    def _fitting(self, shown: list[int], width: int) -> tuple[list[int], list[int], list[int]]:
        """Return the columns that fit, the columns stated on lines of their own, and the hidden columns."""
        stated: list[int] = []
        hidden: list[int] = []
        while sum(max(self._lengths(i)) + 1 for i in shown) - 1 > width:
            rank = max((self.columns[i].rank for i in shown), default=0)
            for i in [i for i in shown if self.columns[i].rank == rank and (rank or self.columns[i].shared)]:
                (stated if self.columns[i].shared else hidden).append(i)
                shown.remove(i)
            if not rank:
                break
        return shown, sorted(stated), sorted(hidden)

    def _lengths(self, index: int) -> list[int]:
        """Return the lengths of a column's cells, or of their words where the column wraps."""
        column = self.columns[index]
        cells = [column.name, *(column.cell(row.values[index]) for row in self.rows)]
        return [len(part) for cell in cells for part in (cell.split() or [""] if column.wraps else [cell])]

    def _grid(self, shown: Sequence[int], stated: Sequence[int], width: int) -> list[str]:
        """Return the heading and the lines of every row; a line states changed values of the columns in `stated`."""
        columns, cells = [self.columns[i] for i in shown], [self._cells(row, shown) for row in self.rows]
        names, lengths = [column.name for column in columns], [self._lengths(i) for i in shown]
        wrapping = [at for at, column in enumerate(columns) if column.wraps]
        gap = 2 if wrapping and sum(map(max, lengths)) + 2 * (len(shown) - 1) <= width else 1
        widths = [max(map(len, texts)) for texts in zip(names, *cells, strict=True)]

        def narrowed(at: int) -> tuple[int, int]:
            """Return how many words a narrower column breaks that are whole now, and the negative of its width."""
            return lengths[at].count(widths[at]), -widths[at]

        while sum(widths) + gap * (len(shown) - 1) > width and any(widths[at] > 1 for at in wrapping):
            widths[min(filter(lambda at: widths[at] > 1, wrapping), key=narrowed)] -= 1

        def laid_out(texts: Sequence[str]) -> list[str]:
            parts = [
                [line[at : at + room] for line in wrapped(text, room or 1, "") for at in range(0, len(line), room)]
                for text, room in zip(texts, widths, strict=True)
            ]
            marks = ["<" if column.is_text else ">" for column in columns]
            return [
                (" " * gap).join(f"{text:{mark}{room}}" for text, mark, room in zip(row, marks, widths, strict=True)).rstrip()
                for row in zip_longest(*parts, fillvalue="")
            ]

        lines, before = laid_out(names), None
        for row, texts in zip(self.rows, cells, strict=True):
            if stated and (before is None or any(row.values[i] != before.values[i] for i in stated)):
                lines += wrapped(f"-- {self._stated(row, stated)}", width)
                before = None
            is_same = before is not None and row.values[: self.repeated] == before.values[: self.repeated]
            lines += laid_out(["" if is_same and i < self.repeated else text for i, text in zip(shown, texts, strict=True)])
            if row.note:
                lines += _noted(lines.pop(), printable(" ".join(row.note.split())), width)
            before = row
        return lines

    def _cells(self, row: Row, shown: Iterable[int]) -> list[str]:
        return [self.columns[i].cell(row.values[i]) for i in shown]


def _noted(line: str, note: str, width: int) -> list[str]:
    """Return a row's line with its note behind the last cell; a line below holds the note if there is little room."""
    is_beside = width - len(line) - 2 >= _LEAST_ROOM
    indent = len(line) + 2 if is_beside else min(_NOTE_INDENT, width // 2)
    words = textwrap.wrap(note, width - indent, max_lines=_NOTE_LINES, placeholder=" …", break_on_hyphens=False)
    lines = [" " * indent + part for part in words]
    return [f"{line}  {words[0]}", *lines[1:]] if is_beside else [line, *lines]


def join_tables(tables: Iterable[Table], style: str, width: int) -> str:
    """Return tables below each other; CSV has a single heading where the tables have equal columns."""
    listed = list(tables)
    texts = [table.render(style, width) for table in listed]
    if style == "csv" and all(a.columns == b.columns for a, b in pairwise(listed)):
        return "".join([*texts[:1], *(text.partition("\n")[2] for text in texts[1:])])
    return "\n".join(texts)


def _pipe(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def printable(text: str) -> str:
    """Return the text with control characters, escape sequences and marks of writing direction as visible escapes."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the ratio; None where either value is not known."""
    return None if numerator is None or denominator is None else numerator / denominator


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: `1 row`, `3 rows`."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def pairs(values: Mapping[str, object]) -> str:
    """Return values with their names: `block=1024 warps=4`."""
    return " ".join(f"{name}={value}" for name, value in values.items())


def wrapped(text: str, width: int, indent: str = "  ") -> list[str]:
    """Return words on lines of at most `width` characters, from the second line on with an indent; longer words stay whole."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
