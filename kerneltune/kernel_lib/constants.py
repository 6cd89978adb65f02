"""Group compile-time constants, so that a kernel takes a group as a parameter."""

from dataclasses import fields
from functools import lru_cache
from typing import Any, Self

import triton.language as tl

from kerneltune.kernel_lib.tl_lib import INTERPRETED


class Constants:
    """The base of a group: a subclass is a dataclass with `frozen=True, eq=False, repr=False` that has a field for each constant.

    A kernel takes a group as `tl.constexpr`, and finds a `tl.constexpr` in each field.
    """

    _values: tuple[Any, ...]

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, **values: Any) -> Self:
        """Return the group of these values. Because a launch has made it before, most calls return an object that exists."""
        return cls(**values)

    def __post_init__(self) -> None:
        """Make a `tl.constexpr` of each field, so that arithmetic on a field is done while the kernel is compiled.

        The interpreter computes with plain values.
        """
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        object.__setattr__(self, "_values", tuple(getattr(self, name) for name in names))
        for name, value in zip(names, self._values if not INTERPRETED else (), strict=False):
            object.__setattr__(self, name, tl.constexpr(value))

    def __eq__(self, other: object) -> bool:
        """Compare class and values, as Triton does to find a compiled kernel."""
        return type(other) is type(self) and isinstance(other, Constants) and other._values == self._values

    def __hash__(self) -> int:
        """Hash the values."""
        return hash(self._values)

    def __repr__(self) -> str:
        """Return an identifier, because Triton makes names of functions and keys of kernels out of it."""
        return "_".join([type(self).__name__, *map(str, self._values)])
