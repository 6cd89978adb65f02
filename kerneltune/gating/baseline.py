"""Load the gate's baseline from a file of records, on disk or in a git revision.

This module judges nothing.
"""

import subprocess
from pathlib import Path

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
        data = _git(folder, "cat-file", "blob", f"{revision}:{inside}")
    except ValueError as error:
        raise ValueError(f"baseline: {name!r}: no such file, and {error}") from error
    return parse(data, f"{revision}:{inside}")


def is_file_name(name: str) -> bool:
    """Return whether `name` means a file rather than a revision; the file need not exist."""
    return Path(name).exists() or (name.endswith(SUFFIX) and ":" not in name)


def _git(folder: Path, *arguments: str) -> bytes:
    """Return the output of git in a folder.

    Raises:
        ValueError: git is not installed, or git fails.
    """
    try:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=True).stdout
    except OSError as error:
        raise ValueError(f"git cannot be run: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(f"git says: {lines[0] if lines else 'nothing'}") from error
