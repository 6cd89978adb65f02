"""Give garbage where Triton defines no value: elements that a mask leaves out, and casts of NaN or out of range to integers."""

from collections.abc import Set
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import numpy as np

from kerneltune.interpreter.faults import setting

_ZEROS: ContextVar[Set[str]] = ContextVar("zeros", default=frozenset())

INTEGER_GARBAGE = 90
"""Garbage for integers: small, so that address arithmetic on masked elements does not overflow."""
_FLOAT_GARBAGE = {"bf16": (0x7F7F, 0x7FC0, 0xFF7F), "fp8e4nv": (0x7E, 0x7F, 0xFE), "fp8e5": (0x7B, 0x7E, 0xFB)}
"""Largest value, NaN and least value, as bits, of the types that the interpreter stores as integers."""


def zeros_for_garbage(places: Set[str]) -> AbstractContextManager[Set[str]]:
    """Let elements that a mask leaves out in loads at PATH:LINE be 0 within, to tell whether a disagreement hangs on them."""
    return setting(_ZEROS, places)


def garbage(mask: Any, kind: Any, dtype: Any, place: str) -> Any:
    """Return garbage for the elements that a mask leaves out: the largest value, NaN and the least value in turns."""
    if kind.is_ptr() or place in _ZEROS.get():
        return np.zeros(mask.shape, dtype)
    if kind.is_floating() and dtype.kind == "f":
        values = (np.finfo(dtype).max, np.nan, np.finfo(dtype).min)
    else:
        values = _FLOAT_GARBAGE.get(kind.name, (INTEGER_GARBAGE,) * 3)
    values_of_all = np.zeros(mask.shape, dtype)
    left_out = np.flatnonzero(~mask)
    for first, value in enumerate(values):
        values_of_all.flat[left_out[first :: len(values)]] = value
    return values_of_all


def cast_to_integer(builder: Any, source: Any, target: Any) -> Any:
    """Stand for InterpreterBuilder.create_fp_to_si: NaN and values out of range, for which no result is defined, give garbage."""
    from triton import language as tl

    result, kind = builder.cast_impl(source, target), target.scalar
    values = source.data if source.data.dtype.kind == "f" else builder.cast_impl(source, tl.float32).data
    whole = np.trunc(values.astype(np.float64))
    is_defined = (whole >= kind.get_int_min_value()) & (whole <= kind.get_int_max_value())
    if kind.int_bitwidth > 1 and not is_defined.all():
        result.data = np.where(is_defined, result.data, np.array(INTEGER_GARBAGE, result.data.dtype))
    return result
