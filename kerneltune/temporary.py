"""Temporary folders that are removed also where SIGKILL ends their process: by the next process that asks for one.

A folder holds a file that its process keeps locked. The lock ends with the process. Imports the standard library.
"""

import atexit
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

_YOUNG_S = 60.0
PREFIX = "ktune-"
"""What the names of the folders begin with; short, for the path of a socket has 107 bytes at most."""
_HELD = ".kerneltune-held"
"""File of a folder, locked by the process that uses the folder."""


@contextmanager
def held_folder(prefix: str = PREFIX) -> Iterator[Path]:
    """Yield a new temporary folder, and remove it afterwards. Removes abandoned ones first."""
    remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name, _hold(Path(name)):
        yield Path(name)


def process_folder() -> Path:
    """Return a new temporary folder that lasts as long as this process. Removes abandoned ones first."""
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    held = _hold(folder)

    def remove(owner: int = os.getpid()) -> None:
        if os.getpid() == owner:  # not in a fork
            held.close()
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def remove_abandoned() -> None:
    """Remove this user's folders that no process holds; a folder without the file that says so, where it is empty and old."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.getuid():
                continue
            if is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
            elif status.st_mtime < time.time() - _YOUNG_S:
                folder.rmdir()


def is_abandoned(folder: Path) -> bool:
    """Return whether the process that held a folder has ended, or the folder is gone."""
    try:
        with (folder / _HELD).open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except FileNotFoundError:
        return not folder.exists()
    except OSError:  # locked, or another user's
        return False


def _hold(folder: Path) -> TextIO:
    """Return the file that holds a folder until it is closed; under its name it is locked from the first moment."""
    new = folder / f"{_HELD}.new"
    held = new.open("w")
    fcntl.flock(held, fcntl.LOCK_EX)
    new.rename(folder / _HELD)
    return held
