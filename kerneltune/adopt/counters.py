"""Count launches by name in a file that each process maps, so that the counts stay however the process ends."""

import mmap
import os
import struct
import weakref
from collections.abc import Iterable
from pathlib import Path
from threading import RLock
from typing import Any

_RECORD = struct.Struct("q248s")
"""A count and its name in UTF-8. Of a longer name the end is kept."""
_STEP = _RECORD.size // 8
_GROWTH = 256
"""Records by which the file grows."""
SUFFIX = ".counts"


class Counters:
    """Count launches of this process by name. A forked process counts from zero into a file of its own."""

    def __init__(self, folder: Path | None) -> None:
        """Count into a file of `folder`, which the first count makes; with None count in memory alone."""
        self._folder = folder
        self._slots: dict[str, int] = {}
        self._counts: Any = None
        self._lock = RLock()
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    def _forget(self) -> None:
        self._counts, self._lock = None, RLock()  # another thread of the parent may have held the lock

    def slot(self, name: str) -> int:
        """Return the place of a name's count, for `add`."""
        with self._lock:  # because threads at once would get the same place for two names
            slot = self._slots.get(name)
            if slot is None:
                slot = self._slots[name] = len(self._slots) * _STEP
                if self._counts is not None:
                    if slot >= len(self._counts):
                        self._open(self.by_name())
                    else:
                        self._write_name(self._counts, name, slot)
            return slot

    def add(self, slot: int) -> None:
        """Add 1 to a count. The hot path of serving."""
        try:
            self._counts[slot] += 1
        except TypeError:  # nothing was counted in this process yet
            with self._lock:
                if self._counts is None:
                    self._open({})
            self._counts[slot] += 1

    def by_name(self) -> dict[str, int]:
        """Return the counts of this process by name."""
        counts = self._counts
        return {} if counts is None else {name: counts[slot] for name, slot in list(self._slots.items()) if slot < len(counts)}

    def _open(self, counted: dict[str, int]) -> None:
        """Map a file with room for all names and the counts so far; memory stands for a file that cannot be made."""
        size = (len(self._slots) // _GROWTH + 1) * _GROWTH * _RECORD.size
        try:
            memory = self._mapped(size)
        except OSError:  # a full disk, a folder that the program deleted: the counts of this process are lost when it ends
            memory = bytearray(size)
        counts = memoryview(memory).cast("q")
        for name, slot in self._slots.items():
            self._write_name(counts, name, slot)
            counts[slot] = counted.get(name, 0)
        self._counts = counts  # last, because other threads count in it from here on

    def _mapped(self, size: int) -> Any:
        """Return a new file's bytes as memory that is written to disk, with its space reserved.

        Raises:
            OSError: the file cannot be made, or its file system is full.
        """
        if self._folder is None:
            return bytearray(size)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{os.getpid()}-{id(self):x}{SUFFIX}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(file, 0, size)  # because a write to a mapped hole of a full disk ends the program
            return mmap.mmap(file, size)
        finally:
            os.close(file)

    @staticmethod
    def _write_name(counts: Any, name: str, slot: int) -> None:
        counts.cast("B")[8 * slot + 8 : 8 * (slot + _STEP)] = name.encode()[-248:].ljust(248, b"\0")


def read_counts(files: Iterable[Path]) -> dict[str, int]:
    """Return the sums of the counts of processes, by name. A file that cannot be read counts nothing."""
    counts: dict[str, int] = {}
    for path in files:
        try:
            data = path.read_bytes()
        except OSError:
            continue
        for count, name in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size]):
            if text := name.rstrip(b"\0").decode(errors="replace"):
                counts[text] = counts.get(text, 0) + count
    return counts
