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
    path = Path(name)
    if is_file_name(name):
        return load(path)
    revision, _, inside = name.partition(":")
    folder = Path() if inside else counterpart.parent
    inside = inside or f"./{counterpart.name}"
    if not revision or revision.startswith("-") or not folder.is_dir():
        raise ValueError(f"baseline: {name!r}: expected a {SUFFIX} file, or a git revision that has {counterpart}")
    try:
        data = git(folder, "cat-file", "blob", f"{revision}:{inside}")
    except ValueError as error:
        if _is_without(revision, inside, folder):
            shown = counterpart if name == revision else inside
            message = f"{shown}: not in {revision}: commit the records there first, or name a {SUFFIX} file to compare with"
            raise ValueError(f"baseline: {name!r}: {message}") from error
        raise ValueError(f"baseline: {name!r}: no such file, and {error}") from error
    return parse(data.splitlines(keepends=True), f"{revision}:{inside}")


def _is_without(revision: str, inside: str, folder: Path) -> bool:
    """Return whether a revision exists and has nothing at the path `inside`, which counts from `folder` if it begins with `.`."""
    try:
        return not git(folder, "ls-tree", *([] if inside.startswith(".") else ["--full-tree"]), revision, inside)
    except ValueError:
        return False


def is_file_name(name: str) -> bool:
    """Return whether `name` means a file rather than a revision; the file need not exist."""
    return Path(name).exists() or (name.endswith(SUFFIX) and ":" not in name)
