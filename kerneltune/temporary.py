"""Temporary folders that are removed also where SIGKILL ends their process: by the next process that asks for one.

A folder holds a file that its process keeps locked. The lock ends with the process. Imports the standard library.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PREFIX = "ktune-"
"""Beginning of the folders' names."""
_LONGEST = 107 - len("/ktune-12345678/listener-12345678")
"""Bytes of the path that may hold a folder for sockets: of a socket's path the system takes 107."""
_SHORT = Path("/tmp")
_HELD = ".kerneltune-held"
"""File of a folder, locked by the process that uses the folder."""


@contextmanager
def held_folder(prefix: str = PREFIX) -> Iterator[Path]:
    """Yield a new temporary folder, and remove it afterwards. Removes abandoned ones first."""
    remove_abandoned()
    folder, held = _new_folder(prefix)
    with held:
        try:
            yield folder
        finally:
            remove(folder)


def process_folder() -> Path:
    """Return a new temporary folder for sockets that lasts as long as this process. Removes abandoned ones first.

    It is below /tmp where the path of TMPDIR is too long for sockets.
    """
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) > _LONGEST:
        parent = _SHORT
    remove_abandoned(parent)
    folder, held = _new_folder(PREFIX, parent)

    def end(owner: int = os.getpid()) -> None:
        if os.getpid() == owner:  # not in a fork
            remove(folder)
            held.close()

    atexit.register(end)
    return folder


def remove_abandoned(parent: Path | None = None) -> None:
    """Remove this user's folders that no process holds, of folders without the file that says so only empty ones.

    parent: that holds them; TMPDIR if not given.
    """
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.lstat().st_uid != os.getuid():
                continue
            try:
                with _locked(folder):
                    remove(folder)
            except FileNotFoundError:
                folder.rmdir()


def is_abandoned(folder: Path) -> bool:
    """Return whether the process that held a folder has ended, or the folder is gone."""
    try:
        _locked(folder).close()
    except FileNotFoundError:
        return not folder.exists()
    except OSError:  # locked, or another user's
        return False
    return True


def _new_folder(prefix: str, parent: Path | None = None) -> tuple[Path, BinaryIO]:
    """Return a new folder, and the file that holds it until it is closed."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        with suppress(FileNotFoundError):  # another process took the folder for abandoned before it was held
            held = (folder / _HELD).open("wb")
            fcntl.flock(held, fcntl.LOCK_EX)
            if os.fstat(held.fileno()).st_nlink:
                return folder, held
            held.close()


def _locked(folder: Path) -> BinaryIO:
    """Return the file of a folder that nobody holds, which is now held here."""
    held = (folder / _HELD).open("rb")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held.close()
        raise
    return held


def remove(folder: Path) -> None:
    """Remove a folder that is held, as far as possible; the file that says so last, so that what a kill leaves can be told."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _HELD:
                path.unlink(missing_ok=True)
        (folder / _HELD).unlink(missing_ok=True)
        folder.rmdir()
