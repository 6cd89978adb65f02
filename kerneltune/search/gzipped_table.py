"""Read and write gzipped CSV tables whose first line is a JSON header, as measured spaces and observations are kept.

A file that is read is data of anybody: its text has a largest size, however well it is compressed, and its header a schema.
Knows nothing of what the columns are.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from kerneltune.files import Versioned, decode_versioned, opened, replace_bytes

SUFFIX = ".csv.gz"
Kind = Literal["int", "float", "str", "bool"]
"""The type of a column that an operator defines, as a header names it."""
TYPES: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": lambda text: {"True": True, "False": False}[text],
}
"""Type in a header -> what makes a value of a cell."""
_LARGEST = 64 << 20
"""Bytes of the text of the largest file."""
_LONGEST_LINE = 1 << 20

H = TypeVar("H", bound=Versioned)
R = TypeVar("R")


def time_text(time_us: float | None) -> str:
    """Return a time as it stands in a cell; empty for none."""
    return "" if time_us is None else f"{time_us:.6g}"


def write(path: Path, head: Mapping[str, Any], columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a file; the same content gives the same bytes.

    Raises:
        ValueError: the folder cannot be written.
    """
    text = io.StringIO()
    text.write(f"# {json.dumps(head)}\n")
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    replace_bytes(path, gzip.compress(text.getvalue().encode(), 9, mtime=0))


def read(
    path: Path, row: str, schema: type[H], version: int, columns: Callable[[H], Sequence[str]], parse: Callable[[H, list[str]], R]
) -> tuple[H, list[R]]:
    """Return the header of a file, and what its rows say.

    Args:
        path: the file.
        row: what a row is, with its article, for messages.
        schema: of the header.
        version: of the schema.
        columns: header -> the names of the columns. Raises ValueError for a header that is wrong.
        parse: (header, cells) -> what a row says. Raises ValueError or KeyError for cells that are wrong.

    Raises:
        ValueError: one line naming the file, the line, and what is wrong with it.
    """
    lines = _text(path).splitlines()
    first, second = [*lines[:2], "", ""][:2]
    if not first.startswith("# {") or len(first) > _LONGEST_LINE:
        raise ValueError(f"{path}:1: header: {first[:80]!r}: expected a JSON object behind `# `")
    try:
        head = decode_versioned(first.removeprefix("# "), schema, version)
        expected = ",".join(columns(head))
    except ValueError as error:
        raise ValueError(f"{path}:1: header: {error}") from error
    if second != expected:
        raise ValueError(f"{path}:2: columns: {second[:80]!r}: expected {expected[:1000]}")
    return head, list(_parsed(path, row, lines[2:], lambda cells: parse(head, cells)))


def _parsed(path: Path, row: str, lines: Sequence[str], parse: Callable[[list[str]], R]) -> Iterable[R]:
    rows = csv.reader(lines)
    cells: list[str] = []
    try:
        for cells in rows:
            yield parse(cells)
    except csv.Error as error:
        raise ValueError(f"{path}:{rows.line_num + 2}: not {row}: {error}") from error
    except (ValueError, KeyError) as error:
        raise ValueError(f"{path}:{rows.line_num + 2}: not {row}: {','.join(cells)[:80]!r}") from error


def _text(path: Path) -> str:
    """Return the text of a file, decompressed as far as the largest size goes.

    Raises:
        ValueError: one line naming the file.
    """
    try:
        with opened(path) as file, gzip.open(file) as unpacked:
            data = unpacked.read(_LARGEST + 1)
        if len(data) <= _LARGEST:
            return data.decode()
    except (EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: not a gzipped text") from error
    raise ValueError(f"cannot read {path}: more than {_LARGEST} bytes of text")
