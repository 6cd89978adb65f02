"""What values a knob may have: as a search's space offers them, somewhat beyond, and nothing that no kernel takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_BEYOND = 4
"""A knob may be larger or smaller than all that a space offers by this factor: `tune --knob` widens spaces."""
_MOST_WARPS = 32


@dataclass(frozen=True, slots=True)
class Range:
    """The values of a knob.

    Attributes:
        offered: the values of the space.
        low, high: bounds of whole numbers.
        powers: whether whole numbers must be powers of two, or 0 where 0 is offered.
    """

    offered: frozenset[Any]
    low: int
    high: int
    powers: bool

    def holds(self, value: object) -> bool:
        """Return whether a kernel may be given the value."""
        if value in self.offered:
            return True
        if type(value) is not int:
            return False
        return value > 0 and self.low <= value <= self.high and not (self.powers and value & (value - 1))

    def joined(self, other: "Range") -> "Range":
        """Return the range that holds what either holds."""
        bounds = min(self.low, other.low), max(self.high, other.high)
        return Range(self.offered | other.offered, *bounds, self.powers and other.powers)


def ranges_of(space: Mapping[str, tuple[Any, ...]]) -> dict[str, Range]:
    """Return the range of every knob of a space."""
    found = {}
    for name, offered in space.items():
        whole = [value for value in offered if type(value) is int]
        high = max(whole, default=0) * _BEYOND
        if name == "warps":
            high = min(high, _MOST_WARPS)
        powers = all(value >= 0 and not value & (value - 1) for value in whole)
        found[name] = Range(frozenset(offered), min(whole, default=0) // _BEYOND, high, powers)
    return found


def out_of_range(knobs: Mapping[str, Any], ranges: Mapping[str, Range]) -> str | None:
    """Return which knob has a value that no kernel takes; None if all are well."""
    for name, value in knobs.items():
        if name in ranges and not ranges[name].holds(value):
            text = repr(value) if type(value) is not int or abs(value) < 1 << 64 else "a number of very many digits"
            offered = ", ".join(sorted(map(str, ranges[name].offered))[:8])
            return f"{name}: {text[:60]}: expected a value like {offered}"
    return None
