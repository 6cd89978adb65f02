"""Prepare in a thread what Triton does at the first launch of a process, so that the program does not wait for it.

Compiled kernels of the chosen configs lie beside a table and are copied into Triton's disk cache. Names of its entries are
hashes of source, options, GPU and Triton, so that an entry that does not fit is never found. Code for this process, as Triton
keeps it of launchers, is not copied. Triton digests its own compiler, a library of 400 MB, to name compiled kernels: a thread
does that while the program is still being imported. Triton 3.6 also builds host code for every kernel with the C compiler: the
thread builds all of it at once where the disk cache is new.
"""

import base64
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kerneltune.adopt.folder import read_json, replaced_folder
from kerneltune.adopt.program import warn_once
from kerneltune.wording import counted

FOLDER = "compiled"
_GROUP = "__grp__"
_DATA = frozenset((".json", ".ttir", ".ttgir", ".llir", ".ptx", ".cubin", ".amdgcn", ".hsaco", ".source"))
"""Kinds of files that are copied: code of a GPU and texts, never a library that Triton would load into this process."""


def entry_name(digest: str) -> str:
    """Return the folder in Triton's disk cache of a compiled kernel's hash; empty for none."""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def copy_entries(source: Path, target: Path, names: Iterable[str] | None = None) -> int:
    """Copy compiled kernels that the target lacks between Triton's disk cache and a tuned folder, and return their number.

    Entries that lack a file are left out, because Triton would launch nothing; a line counts them.

    names: names of entries, see `entry_name`; None for all entries of the source.

    Raises:
        OSError: the target cannot be written.
    """
    listed = source.glob("[!.]*") if names is None else (source / name for name in names)
    lacking = [entry for entry in sorted(listed) if entry.is_dir() and not _is_whole(target / entry.name)]
    whole = list(filter(_is_whole, lacking))
    for entry in whole:
        _copy(entry, target / entry.name)
    if damaged := len(lacking) - len(whole):
        kernels = counted(damaged, "compiled kernel")
        warn_once(f"{source}: {kernels} without all files, such as .cubin: Triton compiles anew")
    return len(whole)


def _files_of(group: Path) -> set[str]:
    """Return the names of the data files that an entry's list of files names."""
    paths = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
    return {name for name in paths if Path(name).name == name and Path(name).suffix in _DATA}


def _is_whole(entry: Path) -> bool:
    """Return whether an entry is Triton's and has all its data files; a folder that Triton is writing has no list of files."""
    groups = list(entry.glob(f"{_GROUP}*"))
    try:
        return bool(groups) and all((entry / name).is_file() for group in groups for name in _files_of(group))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _copy(entry: Path, target: Path) -> None:
    """Copy an entry, whole or not at all; its paths become paths of the target."""
    with replaced_folder(target) as part:
        for file in entry.iterdir():
            if file.name.startswith(_GROUP):
                own = {name: str(target / name) for name in _files_of(file)}
                (part / file.name).write_text(json.dumps({"child_paths": own}), encoding="utf-8")
            elif file.is_file() and file.suffix in _DATA:
                shutil.copyfile(file, part / file.name)


LAUNCHERS = Path(FOLDER, "launchers.json")
"""File in a tuned folder: the results of `launcher_of` for its kernels."""
_NVIDIA = "triton.backends.nvidia.driver"
_NO_SCRATCH = {f"{kind}_scratch_{what}": value for kind in ("global", "profile") for what, value in (("size", 0), ("align", 1))}


def prepare(root: Path, is_cache_new: bool) -> None:
    """Build host code if Triton's disk cache lacked kernels of a tuned folder, and let Triton digest its compiler.

    Triton must be imported as a whole.
    """
    if is_cache_new:
        with suppress(Exception):  # the work that fails here fails again at the launch, with Triton's message
            build_launchers(root)
    digest = getattr(sys.modules.get("triton.runtime.cache"), "triton_key", None)
    if digest is not None:  # Triton remembers the digest of its compiler
        with suppress(Exception):  # as above
            digest()


def launcher_of(kernel: Any) -> dict[str, Any]:
    """Return the facts from which Triton makes the host code of a compiled kernel: types of its arguments and TMA descriptors."""
    types = getattr(kernel.src, "signature", {}).values()
    return {"signature": list(types), "descriptors": getattr(kernel.metadata, "tensordesc_meta", None)}


def build_launchers(root: Path) -> None:
    """Build the host code of a tuned folder's kernels with a C compiler on each core.

    Triton keeps the host code in its disk cache. Triton 3.7 and later need no launcher for each kernel. Launchers with tensor
    descriptors are left out: they keep the type of descriptors that Triton defines at that time, and refuse the descriptors of a
    program that defines the type anew.
    """
    nvidia: Any = sys.modules.get(_NVIDIA)
    if not hasattr(nvidia, "make_launcher") or not (root / LAUNCHERS).is_file():
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(max_workers=cores) as pool:
        launchers = read_json(root / LAUNCHERS, dict[str, list[dict[str, Any]]])["launchers"]
        running = [pool.submit(_build, nvidia, launcher) for launcher in launchers if not any(launcher["descriptors"] or ())]
    for build in running:
        build.result()


def _build(nvidia: Any, launcher: Mapping[str, Any]) -> None:
    types = {number: _type(text) for number, text in enumerate(launcher["signature"])}
    options = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False, **_NO_SCRATCH}
    metadata = SimpleNamespace(tensordesc_meta=launcher["descriptors"], **options)
    nvidia.CudaLauncher(SimpleNamespace(constants={}, signature=types), metadata)


def _type(stored: Any) -> Any:
    """Return the type of an argument as Triton writes it, a tuple of types for a tuple."""
    if isinstance(stored, list):
        return tuple(map(_type, stored))
    if not isinstance(stored, str):
        raise ValueError(f"signature: {stored!r}: expected a type's name or a list of them")
    return stored
