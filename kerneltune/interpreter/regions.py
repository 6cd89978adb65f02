"""Give every tensor argument of a launch its own region of addresses, name an element by its address, load without memory."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

REGION_BITS = 46
"""log2 of the bytes of addresses per argument: 64 TiB, more than a 64-bit offset reaches by a bug of 32-bit arithmetic."""
FIRST_REGION = 1 << 4
"""Lower regions are addresses of this process, which a kernel may load from a table. Their accesses are not checked."""
_ALIGNMENT = 4096
LOADED = (0, 1 << 24)
"""Integers that loads without memory give. 0 suits a kernel that reads a table at a loaded index; 2^24, above all rows, suits a
kernel that searches the group of a row: with 0 every group would end at row 0."""
MORE, FAR = 3, 70
"""Integers of further loads without memory. By 3, loops from 1 to a loaded end have iterations; bit 70 lies in another word."""


@dataclass(frozen=True, slots=True)
class Region:
    """Hold the addresses of a tensor argument.

    Attributes:
        is_meta: whether the tensor has no memory.
        first, size: address and bytes of the argument's storage.
        offset: address in memory minus address in the region.
        start: address of the argument's first element, in the region.
        count, largest: elements of the argument, and its largest integer; None if unknown.
    """

    is_meta: bool
    name: str
    dtype: str
    item_size: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    size: int
    offset: int
    start: int
    count: int
    largest: int | None

    @staticmethod
    def of(tensor: Any, number: int, name: str, largest: int | None) -> "Region":
        """Return the region of an argument; its number counts the launch's tensors."""
        storage = tensor.untyped_storage()
        in_memory = 0 if tensor.is_meta else storage.data_ptr()
        first = ((FIRST_REGION + number) << REGION_BITS) + (1 << (REGION_BITS - 1)) + in_memory % _ALIGNMENT
        return Region(
            tensor.is_meta, name, str(tensor.dtype), tensor.element_size(), tuple(tensor.shape), tuple(tensor.stride()),
            first, storage.nbytes(), in_memory - first, first + tensor.storage_offset() * tensor.element_size(),
            tensor.numel(), largest,
        )  # fmt: skip

    @property
    def last(self) -> int:
        """Return the offset of the argument's last element from `first`, in bytes: a slice may end before its storage does."""
        steps = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.start - self.first + steps * self.item_size

    def element(self, address: int) -> str:
        """Name the element at an address, with its place and the argument's shape and type."""
        index = (address - self.start) // self.item_size
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{self.name}: element {index}{self._place(index)} of {shape} {self.dtype.removeprefix('torch.')}"

    def _place(self, element: int) -> str:
        """Return ` at (row, column)` of an element of a tensor with decreasing strides; empty for a tensor without an index."""
        if len(self.strides) < 2 or 0 in self.strides or list(self.strides) != sorted(self.strides, reverse=True):
            return ""
        places = []
        for stride in self.strides:
            place, element = divmod(element, stride)
            places.append(place)
        return f" at {places_text(places)}"


def places_text(places: Iterable[int]) -> str:
    """Return `(0, 1, 2)`."""
    return f"({', '.join(map(str, places))})"


@dataclass(slots=True)
class Integers:
    """Give the integers of loads without memory: `value`; or, with `rise`, integers that rise along a tensor to its largest.

    Attributes:
        rise: factor of the integers that rise.
        most_unknown: most elements of a tensor without a limit whose integers are large, else 0.
        are_loaded, have_unknown: whether integers were loaded, and integers of a tensor without a limit.
    """

    value: int = 0
    rise: float | None = None
    most_unknown: int = 0
    are_loaded: bool = False
    have_unknown: bool = False

    def values(self, addresses: Any, region_of: Callable[[Any], Region]) -> Any:
        """Return the integers at some addresses; region_of: function of addresses that returns the region of the first."""
        if self.rise is None:
            return self.value
        region = region_of(addresses)
        if region.largest is None:
            self.have_unknown = True
            return LOADED[-1] if region.count <= self.most_unknown else 0
        places = (addresses - np.uint64(region.start)).astype(np.float64) / region.item_size
        return self.rise * region.largest * (places / (region.count - 1) if region.count > 1 else 1.0)
