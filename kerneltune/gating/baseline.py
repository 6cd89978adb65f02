"""Where the gate's baseline comes from: a file of records, or such a file in a git revision.

Judges nothing. Imports the standard library and records.
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
    command = ["git", "-C", str(folder), "cat-file", "blob", f"{revision}:{inside}"]
    try:
        done = subprocess.run(command, capture_output=True, check=True)
    except OSError as error:
        raise ValueError(f"baseline: {name!r}: no such file, and git cannot be run: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(f"baseline: {name!r}: no such file, and git says: {said[0] if said else 'nothing'}") from error
    return parse(done.stdout, f"{revision}:{inside}")


def is_file_name(name: str) -> bool:
    """Return whether `name` means a file, there or not, rather than a revision."""
    return Path(name).exists() or (name.endswith(SUFFIX) and ":" not in name)
