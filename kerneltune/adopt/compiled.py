"""Compiled kernels of the chosen configs, kept beside a table, so that a process with an empty Triton cache compiles nothing.

Entries of Triton's disk cache are copied; their names are hashes of source, options, GPU and Triton, so that an entry that does
not fit is never found. Code for this process, as Triton keeps it of launchers, is not copied. Imports the standard library.
"""

import base64
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

FOLDER = "compiled"
_GROUP = "__grp__"
_DATA = frozenset((".json", ".ttir", ".ttgir", ".llir", ".ptx", ".cubin", ".amdgcn", ".hsaco", ".source"))
"""Kinds of files that are copied: code of a GPU and texts, never a library that Triton would load into this process."""


def entry_name(digest: str) -> str:
    """Return the folder in Triton's disk cache of a compiled kernel's hash; empty for none."""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def keep(root: Path, hashes: Iterable[str], cache: Path) -> int:
    """Copy entries of Triton's disk cache into a tuned folder; returns how many are there now.

    Raises:
        OSError: the folder cannot be written.
    """
    kept = 0
    for name in hashes:
        if (cache / name).is_dir():
            _copy(cache / name, root / FOLDER / name)
            kept += 1
    return kept


def give(root: Path, cache: Path) -> int:
    """Copy the entries of a tuned folder that Triton's disk cache lacks into it; returns how many were copied.

    Raises:
        OSError: the disk cache cannot be written.
    """
    folder, given = root / FOLDER, 0
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if entry.is_dir() and not any((cache / entry.name).glob(f"{_GROUP}*")):
            _copy(entry, cache / entry.name)
            given += 1
    return given


def _copy(entry: Path, target: Path) -> None:
    """Copy an entry, whole or not at all; the paths that it holds become those of the target."""
    if target.is_dir() and any(target.glob(f"{_GROUP}*")):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".part-", dir=target.parent))
    try:
        for file in entry.iterdir():
            if file.is_file() and file.suffix in _DATA:
                if file.name.startswith(_GROUP):
                    paths = json.loads(file.read_text(encoding="utf-8"))["child_paths"]
                    own = {name: str(target / name) for name in paths if Path(name).name == name}
                    (part / file.name).write_text(json.dumps({"child_paths": own}), encoding="utf-8")
                else:
                    shutil.copyfile(file, part / file.name)
        if target.is_dir():  # an entry without its group: Triton was writing it
            shutil.rmtree(target, ignore_errors=True)
        os.chmod(part, 0o755)
        os.replace(part, target)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(f"{entry}: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
