"""Find accesses of two programs to one element whose order nothing defines, in a launch that Triton's interpreter runs.

Because the interpreter runs programs in sequence, a race changes no value. Each releasing atomic ends a segment of its program's
run. A program acquires the released segments of an address by an atomic on the address or a volatile load of it. An access is
ordered after a segment if its program acquired the segment before. Two accesses of different programs to an element conflict if
they have no order and are either a plain store with any access, or an atomic with a plain load. So happens-before is computed
by a vector clock of each program, `_known`, and a shadow of each storage.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from kerneltune.interpreter.barriers import begin_threads, note_access
from kerneltune.interpreter.faults import setting

Touched = dict[tuple[str, int], Any]
"""(`load` or `store`, address of a storage) -> whether programs load, or store, each of its bytes."""
_TOUCHED: ContextVar[Touched | None] = ContextVar("touched", default=None)
_ALWAYS = np.iinfo(np.int32).max
_ATOMICS = ("atomic", "atomic of another")
_MOST_PENDING = 1 << 24
"""Most loaded elements that are kept until a store to their storage needs them."""
_MOST_SYNCHRONIZING = 32
"""An atomic on more elements accumulates and orders nothing."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """Describe an element that two programs access without an order.

    Attributes:
        at: offset in the storage, in bytes.
        kind: kind of the access that came first in the interpreter: `load`, `store` or `atomic`.
        program, line: its program and line.
    """

    at: int
    kind: str
    program: int
    line: str


class _Shadow:
    """Hold the last accesses to every unit of a storage, as events; 0 for no access."""

    def __init__(self, size: int, unit: int) -> None:
        self.size, self.unit = size, unit
        self.events: dict[str, Any] = {}
        self.pending: list[tuple[int, Any]] = []
        self.num_pending = 0

    def of(self, kind: str) -> Any:
        """Return the events of a kind, (units,) int32."""
        if kind not in self.events:
            self.events[kind] = np.zeros(-(-self.size // self.unit), np.int32)
        return self.events[kind]

    def units(self, at: Any, item_size: int) -> Any:
        """Return the units that elements at some bytes cover; units become smaller where an element is smaller."""
        if item_size < self.unit:
            factor = self.unit // item_size
            self.events = {kind: np.repeat(events, factor) for kind, events in self.events.items()}
            self.pending = [(e, (units[:, None] * factor + np.arange(factor)).ravel()) for e, units in self.pending]
            self.unit = item_size
        units = (at // np.uint64(self.unit)).astype(np.int64)
        count = item_size // self.unit
        return units if count == 1 else (units[:, None] + np.arange(count)).ravel()


class Races:
    """Record the accesses of a launch; call `begin_program` for each program."""

    def __init__(self, num_programs: int) -> None:
        self._shadows: dict[int, _Shadow] = {}
        self._released: dict[int, Any] = {}
        self._numbers: dict[tuple[int, str], int] = {}
        self._lines = [""]
        self._segments, self._programs = np.zeros(64, np.int32), np.full(64, num_programs, np.int32)
        self._segment = self._program = 0
        self._known: Any = None
        self._num_programs = num_programs
        self._draws: dict[int, int] = {}

    def is_drawn(self, state: Sequence[Any]) -> bool:
        """Return whether another program has drawn random numbers from the same seed and offsets."""
        drawn = hash(tuple(np.asarray(part.handle.data).tobytes() for part in state if hasattr(part, "handle")))
        return self._draws.setdefault(drawn, self._program) != self._program

    def begin_program(self, program: int) -> None:
        """Begin a program, which knows of no other program's accesses."""
        begin_threads()
        self._program = program
        self._segment += 1
        self._known = np.zeros(self._num_programs + 1, np.int32)
        self._known[[program, self._num_programs]] = _ALWAYS

    def _event(self, line: str) -> int:
        """Return the number of the present segment and a line."""
        number = self._numbers.setdefault((self._segment, line), len(self._lines))
        if number == len(self._lines):
            self._lines.append(line)
            if number == len(self._segments):
                self._segments, self._programs = (np.concatenate([old, old]) for old in (self._segments, self._programs))
            self._segments[number], self._programs[number] = self._segment, self._program
        return number

    def _conflict(
        self, shadow: _Shadow, units: Any, kinds: Sequence[str], is_changed: Callable[[], Any] = lambda: True
    ) -> Conflict | None:
        """Return the first conflict of an access with earlier accesses of some kinds.

        Args:
            is_changed: function without arguments -> whether the access changes the value of each unit.
        """
        for kind in kinds:
            if kind not in shadow.events:
                continue
            events = shadow.events[kind][units]
            is_wrong = self._segments[events] > self._known[self._programs[events]]  # not ordered after the event
            if is_wrong.any() and (is_wrong := is_wrong & is_changed()).any():
                first = int(is_wrong.argmax())
                event = int(events[first])
                return Conflict(int(units[first]) * shadow.unit, kind.split()[0], int(self._programs[event]), self._lines[event])
        return None

    def _units(self, storage: int, size: int, at: Any, item_size: int) -> tuple[_Shadow, Any]:
        """Return the last accesses to a storage, and its units that an access covers."""
        if storage not in self._shadows:
            self._shadows[storage] = _Shadow(size, item_size)
        shadow = self._shadows[storage]
        return shadow, shadow.units(at, item_size)

    def load(self, storage: int, size: int, at: Any, mask: Any, item_size: int, line: str, is_shared: bool) -> Conflict | None:
        """Note a load of the elements at some bytes of a storage; return its conflict with an earlier access.

        Args:
            mask: the elements of the block that are loaded.
            is_shared: the load may see what atomics have left until now: it conflicts with plain stores alone.
        """
        note_access("load", storage, at, mask)
        shadow, units = self._units(storage, size, at, item_size)
        conflict = self._conflict(shadow, units, ("store",) if is_shared else ("store", *_ATOMICS))
        if conflict is None and not is_shared:
            shadow.pending.append((self._event(line), units))
            shadow.num_pending += units.size
            if shadow.num_pending > _MOST_PENDING:
                self._flush(shadow)
        return conflict

    def store(
        self, storage: int, size: int, at: Any, mask: Any, item_size: int, line: str, is_changed: Callable[[], Any]
    ) -> Conflict | None:
        """Note a plain store; return its conflict with an earlier access.

        Args:
            mask: the elements of the block that are stored.
            is_changed: function without arguments -> whether the store changes the value of each element.
        """
        note_access("store", storage, at, mask, is_changed)
        shadow, units = self._units(storage, size, at, item_size)
        self._flush(shadow)
        kinds = ("store", *_ATOMICS, "load", "load of another")
        conflict = self._conflict(shadow, units, kinds, lambda: np.repeat(is_changed(), units.size // max(1, at.size)))
        if conflict is None:
            shadow.of("store")[units] = self._event(line)
        return conflict

    def atomic(
        self, storage: int, size: int, at: Any, item_size: int, line: str, acquires: bool, releases: bool
    ) -> Conflict | None:
        """Note an atomic, which orders programs as its semantics say; return its conflict with an earlier access."""
        shadow, units = self._units(storage, size, at, item_size)
        self._flush(shadow)
        places = [storage + int(byte) for byte in at] if at.size <= _MOST_SYNCHRONIZING else []
        if acquires:
            self.acquire(places)
        if (conflict := self._conflict(shadow, units, ("store", "load", "load of another"))) is not None:
            return conflict
        if not places:
            self._enter(shadow, "atomic", self._event(line), units)
            return None
        shadow.of("atomic")[units] = self._event(line)  # atomics on a word have an order, which the value tells
        if releases:
            self._release(places)
        return None

    def end_launch(self) -> None:
        """Note the bytes that programs touched, within `touching`."""
        if (touched := _TOUCHED.get()) is None:
            return
        for (storage, shadow), what in itertools.product(self._shadows.items(), ("load", "store")):
            of_what = (shadow.of(what) != 0) | (shadow.of("atomic") != 0)
            for _event, units in shadow.pending if what == "load" else ():
                of_what[units] = True
            before = touched.get((what, storage), np.zeros(shadow.size, bool))
            touched[what, storage] = np.repeat(of_what, shadow.unit)[: shadow.size] | before[: shadow.size]

    def acquire(self, places: list[int]) -> None:
        """Order the present program after the segments that other programs released at some addresses."""
        for place in places:
            if place in self._released:
                np.maximum(self._known, self._released[place], out=self._known)

    def _release(self, places: list[int]) -> None:
        known = self._known.copy()
        known[self._program] = self._segment
        for place in places:
            before = self._released.get(place)
            self._released[place] = known if before is None else np.maximum(known, before)
        self._segment += 1

    def _flush(self, shadow: _Shadow) -> None:
        """Enter pending loads."""
        for event, units in shadow.pending:
            self._enter(shadow, "load", event, units)
        shadow.pending.clear()
        shadow.num_pending = 0

    def _enter(self, shadow: _Shadow, kind: str, event: int, units: Any) -> None:
        """Enter a load or an atomic; a unit keeps the last access of the kind, and the last of a different program."""
        last, another = shadow.of(kind), shadow.of(f"{kind} of another")
        before = last[units]
        foreign = self._programs[before] != self._programs[event]
        foreign &= before > 0
        another[units[foreign]] = before[foreign]
        last[units] = event


def touching() -> AbstractContextManager[Touched]:
    """Collect the bytes that the programs of launches within load and store, except words that order programs."""
    return setting(_TOUCHED, Touched())
