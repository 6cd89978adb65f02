"""Copy compiled kernels of the chosen configs, which lie beside a table, into Triton's disk cache.

Names of its entries are hashes of source, options, GPU and Triton, so that an entry that does not fit is never found. Code for
this process, as Triton keeps it of launchers, is not copied.
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


def copy_entries(source: Path, target: Path, names: Iterable[str] | None = None) -> int:
    """Copy compiled kernels that the target lacks between Triton's disk cache and a tuned folder, and return their number.

    names: names of entries, see `entry_name`; None for all entries of the source.
    """
    listed = [source / name for name in names or ()]
    if names is None and source.is_dir():
        listed = sorted(source.iterdir())
    return sum(_copy(entry, target / entry.name) for entry in listed if entry.is_dir())


def _copy(entry: Path, target: Path) -> bool:
    """Copy an entry, whole or not at all; its paths become paths of the target. Return False if the target has the entry.

    Raises:
        OSError: the target cannot be written, or the entry is none of Triton's.
    """
    if target.is_dir() and any(target.glob(f"{_GROUP}*")):
        return False
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
        return True
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(f"{entry}: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
