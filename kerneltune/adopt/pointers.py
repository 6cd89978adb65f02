"""Find arguments of a launch that are addresses of memory: a kernel that reads them faults in another process."""

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from kerneltune.adopt.arguments import Argument, is_integer
from kerneltune.adopt.bytecode import functions_of
from kerneltune.adopt.values import Values

_LEAST_ADDRESS, _LARGEST_ADDRESS = 1 << 32, 1 << 48
"""Bounds of addresses: above any index, and the end of the memory that a process can address."""


def holds_addresses(function: Any, arguments: Sequence[Argument], values: Values) -> str:
    """Return the first argument of a kernel's function that is an address or holds addresses, empty for none.

    A number between the bounds of addresses is an address if the kernel makes pointers of integers, or if torch has allocated its
    place on a GPU. New memory of the host may hold addresses that no kernel reads.
    """
    torch: Any = sys.modules["torch"]
    for argument in arguments:
        numbers = _addresses(argument.value)
        raw = None if argument.tensor is None else values.tensors.get(f"storage.{argument.tensor.storage}")
        is_table = argument.tensor is not None and argument.tensor.holds_integers and argument.tensor.element_bytes == 8
        if is_table and raw is not None and raw.numel() % 8 == 0:
            integers = raw.view(torch.int64)
            numbers = integers[(integers >= _LEAST_ADDRESS) & (integers < _LARGEST_ADDRESS)][:1].tolist()
        if any(_makes_pointers(function) or _is_allocated(number) for number in numbers):
            return argument.name
    return ""


def _addresses(value: Any) -> list[int]:
    """Return the integers in the JSON of a value that may be addresses."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in _addresses(item)]
    return [value] if is_integer(value) and _LEAST_ADDRESS <= value < _LARGEST_ADDRESS else []


def _is_allocated(address: int) -> bool:
    """Return whether torch has allocated the memory at an address of a GPU. A large process takes milliseconds to answer."""
    cuda: Any = sys.modules["torch"].cuda
    segments = cuda.memory_snapshot() if cuda.is_initialized() else ()
    return any(segment["address"] <= address < segment["address"] + segment["total_size"] for segment in segments)


@cache
def _makes_pointers(function: Any) -> bool:
    """Return whether a kernel or a helper of it may make pointers of integers, by `pointer_type` or by inline assembly."""
    named = [(reached.__globals__, name) for reached in functions_of(function) for name in reached.__code__.co_names]
    makers = ("pointer_type", "inline_asm_elementwise")
    return any(name in makers or type(held.get(name)).__name__ in makers for held, name in named)
