"""Tell whether the last program of a launch loads and stores the last elements of arguments."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerneltune.interpreter.facts import Fact, Kind
from kerneltune.interpreter.regions import Region

_KINDS: Mapping[str, tuple[Kind, Kind]] = {
    "load": ("last not loaded", "last loaded"),
    "store": ("last not stored", "last stored"),
}
"""Facts of an argument whose last element is left out, and is accessed."""


@dataclass(slots=True)
class _Accesses:
    """Describe the loads or the stores of a launch's programs to an argument, by offsets in bytes.

    Attributes:
        program: number of the last program with an access.
        is_last: whether this program accesses the last element.
        begin, count: nearest offset and number of its accesses; the offset is 0 for an argument with memory.
        end_of_first, count_of_first: furthest offset and number of the first program's accesses; -1 and 0 if it is alone.
    """

    program: int = -1
    is_last: bool = False
    begin: float = math.inf
    count: int = 0
    end_of_first: int = -1
    count_of_first: int = 0

    @property
    def are_in_turns(self) -> bool:
        """Return whether programs take rows in turns, so that the first has a row behind rows of the last, or a row more."""
        return self.end_of_first > self.begin or self.count_of_first > self.count


class LastElements:
    """Hold the accesses of a launch's programs.

    Attributes:
        by_kind: `load` and `store` -> argument -> accesses.
    """

    def __init__(self, num_programs: int) -> None:
        self._num_programs = num_programs
        self.by_kind: dict[str, dict[str, _Accesses]] = {kind: {} for kind in _KINDS}

    def note(self, kind: str, program: int, region: Region, accessed: Any, furthest: int) -> None:
        """Note a program's access to an argument, at least to one element; `furthest` is the largest offset."""
        accesses = self.by_kind[kind].setdefault(region.name, _Accesses())
        if program > accesses.program:
            accesses.program, accesses.is_last, accesses.begin, accesses.count = program, False, math.inf, 0
        if program == accesses.program:
            accesses.is_last |= furthest >= region.last
            accesses.begin = min(int(accessed.min()) if region.is_meta else 0, accesses.begin)
            accesses.count += 1
        if program == 0 < self._num_programs - 1:
            accesses.end_of_first = max(furthest, accesses.end_of_first)
            accesses.count_of_first += 1

    def facts(self, kernel: str, others: Sequence["LastElements"] = ()) -> Iterator[Fact]:
        """Yield a fact for each argument whose last element is loaded or stored, or not.

        Args:
            kernel: the name of the kernel.
            others: the accesses of further runs, whose loads give other numbers, if only the corners of the grid ran; else none.
                Loads or stores that differ between the runs give no facts. A last element then counts as left out only if the
                grid's last program accesses the argument, and if programs do not take rows in turns.
        """
        for kind, fact_kinds in _KINDS.items():
            of_arguments = self.by_kind[kind]
            for name, accesses in of_arguments.items() if all(other.by_kind[kind] == of_arguments for other in others) else ():
                is_by_last = accesses.program == self._num_programs - 1
                if accesses.is_last or not others or (is_by_last and not accesses.are_in_turns):
                    yield Fact(fact_kinds[accesses.is_last], name, kernel)
