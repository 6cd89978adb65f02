"""Load the gate's baseline: a file of records, or such a file in a git revision.

Judges nothing.
"""

import subprocess
from pathlib import Path

from kerneltune.records import Record, load, parse

SUFFIX = ".jsonl"


def load_baseline(name: str, counterpart: Path) -> list[Record]:
    """Return the records of `name`: a file, `REV:PATH` with a path as git takes it, or `REV` for `counterpart` in that revision.

    Raises:
        ValueError: no such file and no such revision, or broken records; one line that names which.
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
    """Return whether `name` means a file, there or not, rather than a revision."""
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
