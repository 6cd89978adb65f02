"""Load the gate's baseline from a file of records, on disk or in a git revision.

This module judges nothing.
"""

from pathlib import Path

from kerneltune.processes import git
from kerneltune.records import Record, load, parse

SUFFIX = ".jsonl"


def load_baseline(name: str, counterpart: Path) -> list[Record]:
    """Return the records of a baseline.

    Args:
        name: a file, `REV:PATH` with a path as git takes it, or `REV` for the file `counterpart` in that revision.
        counterpart: the records that are compared with the baseline.

    Raises:
        ValueError: neither a file nor a revision has this name, or a record is broken; the message is one line.
    """
    if Path(name).exists() or (name.endswith(SUFFIX) and ":" not in name):
        return load(Path(name))
    revision, _, inside = name.partition(":")
    folder = Path() if inside else counterpart.parent
    inside = inside or f"./{counterpart.name}"
    if not revision or revision.startswith("-") or not folder.is_dir():
        raise ValueError(f"baseline: {name!r}: expected a {SUFFIX} file, or a git revision that has {counterpart}")
    try:
        data = git(folder, "cat-file", "blob", f"{revision}:{inside}")
    except ValueError as error:
        expected = f"expected a {SUFFIX} file, or a revision in which the records are committed"
        raise ValueError(f"baseline: {name!r}: no such file, and {error}: {expected}") from error
    return parse(data.splitlines(keepends=True), f"{revision}:{inside}")
