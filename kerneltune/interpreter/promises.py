"""Check promises to Triton's compiler: `tl.multiple_of`, `tl.max_contiguous` and `tl.max_constancy`.

A promise about a tensor has an effect only where it makes an access a vector. Triton's analysis AxisInfo decides this by the
alignment, contiguity and constancy of integers. In launches of kernels with promises this module computes the same facts, and
an access that a wrong promise makes a vector takes the elements that a GPU takes. Operations without a rule here have unknown
facts, so that fewer accesses are vectors than on a GPU.
"""

import functools
import math
from collections.abc import Callable
from contextvars import ContextVar
from functools import partialmethod
from typing import Any, NamedTuple

import numpy as np

from kerneltune.interpreter.facts import WITHOUT_MEMORY, note_here
from kerneltune.interpreter.faults import KernelFaultError, line_of

_NAMES = {"tt.divisibility": "multiple_of", "tt.contiguity": "max_contiguous", "tt.constancy": "max_constancy"}
_VECTOR = 16
"""Bytes of the widest access of a thread, at least as many as its elements. Triton compiles for arguments that are multiples."""
_LARGEST = 1 << 62
"""Divisor of 0, which all powers of two divide."""
_ASCENDING = {np.less: 0, np.greater_equal: 0, np.less_equal: 1, np.greater: 1}
"""Comparisons that are equal within an aligned group, and which of their operands is contiguous there."""


FOLLOWED: ContextVar[int] = ContextVar("followed", default=0)
"""The threads of a program of the kernel that runs if the kernel makes promises, else 0."""


class _Axis(NamedTuple):
    """Hold the compiler's facts about an axis, in powers of two.

    Attributes:
        contiguity: length of aligned groups whose values rise by 1.
        divisor: divisor of the first value of each group.
        constancy: length of aligned groups of equal values.
    """

    contiguity: int
    divisor: int
    constancy: int


class _Known(np.ndarray[Any, Any]):
    """Hold integers, addresses or a mask with the compiler's facts about them.

    Attributes:
        axes: the facts about each axis; None without facts.
        is_one: whether the value is an argument of 1, which Triton makes a constant.
        wrong: the wrong promise that made a fact; empty if no promise is wrong.
    """

    axes: tuple[_Axis, ...] | None = None
    is_one = False
    wrong = ""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        values = [np.asarray(value) if isinstance(value, _Known) else value for value in inputs]  # a Python number keeps no type
        result = getattr(ufunc, method)(*values, **kwargs)
        if method != "__call__" or len(inputs) != 2 or not isinstance(result, np.ndarray) or result.dtype.kind not in "biu":
            return result
        parts = zip(*(_axes(value, result.shape) for value in inputs), strict=True)
        is_one = [value.is_one if isinstance(value, _Known) else np.ndim(value) == 0 and value == 1 for value in inputs]
        return _known(result, [_combined(ufunc, left, right, is_one) for left, right in parts], *inputs)

    def __array_function__(self, function: Any, types: Any, args: Any, named: Any) -> Any:
        result = super().__array_function__(function, types, args, named)
        if not isinstance(result, np.ndarray):
            return result
        result = np.asarray(result)
        if function is np.ones_like:  # an access without a mask gets a mask
            return _known(result, [_Axis(1, 1, length) for length in result.shape])
        if function is np.broadcast_to:
            return _known(result, _axes(self, result.shape), self)
        if function is np.expand_dims and self.axes:
            divisor = math.gcd(*(1 if axis.contiguity > 1 else axis.divisor for axis in self.axes))
            axes = list(self.axes)
            axes.insert(args[1] % result.ndim, _Axis(1, divisor, 1))
            return _known(result, axes, self)
        return result

    def astype(self, dtype: Any, *args: Any, **named: Any) -> Any:
        result = np.asarray(self).astype(dtype, *args, **named)
        return _known(result, self.axes, self) if result.dtype.kind in "iu" else result


def _known(values: Any, axes: Any, *sources: Any) -> Any:
    """Return values with facts about their axes, and with the wrong promise of their sources."""
    result = np.asarray(values).view(_Known)
    result.axes = axes and tuple(axes)
    result.wrong = next((source.wrong for source in sources if isinstance(source, _Known) and source.wrong), "")
    return result


def _axes(value: Any, shape: tuple[int, ...]) -> list[_Axis]:
    """Return the facts about each axis of a value that is repeated to a shape."""
    size, value_shape, known = np.size(value), np.shape(value), getattr(value, "axes", None)
    if size == 1:
        divisor = known[-1].divisor if known else 1 if np.ndim(value) else _low_bit(int(value))
        return [_Axis(1, divisor, length) for length in shape]
    known = known or (_Axis(1, 1, 1),) * len(value_shape)
    padded = [(1, _Axis(1, 1, 1))] * (len(shape) - len(value_shape)) + list(zip(value_shape, known, strict=True))
    return [_Axis(1, axis.divisor, length) if n < length else axis for (n, axis), length in zip(padded, shape, strict=True)]


def _low_bit(number: int) -> int:
    """Return the largest power of two that divides an integer."""
    return number & -number or _LARGEST


def _combined(ufunc: Any, left: _Axis, right: _Axis, is_one: list[bool], size: int = 1) -> _Axis:
    """Return the facts about the result of an operation; `size`: bytes of the elements that an address moves by."""
    constancy = math.gcd(left.constancy, right.constancy)
    if ufunc in (np.add, np.subtract):
        contiguity = math.gcd(left.contiguity, right.constancy)
        if ufunc is np.add:
            contiguity = max(contiguity, math.gcd(left.constancy, right.contiguity))
        return _Axis(contiguity, math.gcd(left.divisor, right.divisor * size), constancy)
    if ufunc is np.multiply:
        contiguity = left.contiguity if is_one[1] else right.contiguity if is_one[0] else 1
        factors = [
            1 if axis.contiguity > 1 and not other else axis.divisor
            for axis, other in zip((left, right), reversed(is_one), strict=True)
        ]
        return _Axis(contiguity, min(math.prod(factors), _LARGEST), constancy)
    if ufunc in _ASCENDING:
        rising, limit = (left, right) if _ASCENDING[ufunc] == 0 else (right, left)
        constancy = max(constancy, math.gcd(rising.contiguity, limit.constancy, rising.divisor, limit.divisor))
    return _Axis(1, 1, constancy)


@functools.cache
def makes_promises(function: Any) -> bool:
    """Return whether the code of a kernel, or of a device function that it calls by name, makes a promise."""
    known, found = {function}, [function]
    for each in found:
        names = each.__code__.co_names
        if not set(_NAMES.values()).isdisjoint(names):
            return True
        called = {getattr(each.__globals__.get(name), "fn", None) for name in names}
        found += [other for other in called - known if hasattr(other, "__code__")]
        known |= called
    return False


def follow_argument(argument: Any) -> None:
    """Follow an argument of a launch that makes promises: Triton compiles for multiples of 16, and for 1."""
    handle: Any = getattr(argument, "handle", None)
    data = getattr(handle, "data", None)
    if FOLLOWED.get() and isinstance(data, np.ndarray) and data.dtype.kind in "iu":
        value = int(data.flat[0])
        handle.data = _known(data, [_Axis(1, 1 if value % _VECTOR else _VECTOR, 1)])
        handle.data.is_one = value == 1 and not handle.dtype.is_ptr()


def promise_parts() -> dict[tuple[Any, str], Any]:
    """Return the parts of the interpreter, (owner, name), that are replaced in the mode `modes.strict`."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def made(builder: Any, make: Callable[..., Any], *args: Any) -> Any:
        result = make(builder, *args)
        if not FOLLOWED.get():
            return result
        first = int(result.data.flat[0]) if result.data.size > 1 else 1  # of a program's place nothing is known
        result.data = _known(result.data, [_Axis(result.data.size, _low_bit(first), 1)])
        return result

    def moved(builder: Any, move: Callable[..., Any], address: Any, offset: Any) -> Any:
        result = move(builder, address, offset)
        if isinstance(address.data, _Known):
            size = max(1, address.get_element_ty().primitive_bitwidth // 8)
            parts = zip(*(_axes(each.data, result.data.shape) for each in (address, offset)), strict=True)
            axes = [_combined(np.add, left, right, [False, False], size) for left, right in parts]
            result.data = _known(result.data, axes, address.data, offset.data)
        return result

    patched: dict[str, Any] = {"create_make_range": made, "create_get_program_id": made, "create_addptr": moved}
    methods: dict[tuple[Any, str], Any] = {
        (InterpreterBuilder, name): partialmethod(function, getattr(InterpreterBuilder, name))
        for name, function in patched.items()
    }
    return {**methods, (TensorHandle, "set_attr"): _promised}


def _promised(handle: Any, name: str, values: Any) -> None:
    """Stand for TensorHandle.set_attr: check a promise, by which a GPU vectorizes accesses.

    The facts of a tensor follow from its promises.

    Raises:
        KernelFaultError: a scalar is no multiple.
    """
    handle.attr[name] = values
    data, text = handle.data, _NAMES.get(name, "")
    if data.size == 1:
        if text == "multiple_of" and int(data.flat[0]) % int(values[0]):
            raise KernelFaultError(f"multiple_of: {int(data.flat[0])} is no multiple of {values[0]}{line_of()}")
        return
    if not text or data.dtype.kind not in ("biu" if text == "max_constancy" else "iu") or WITHOUT_MEMORY.get():
        return
    step = max(1, handle.get_element_ty().primitive_bitwidth // 8) if handle.dtype.is_ptr() else 1
    axes = list(getattr(data, "axes", None) or (_Axis(1, 1, 1),) * data.ndim)
    is_kept = True
    for at, value in enumerate(map(int, values)):
        axes[at] = axes[at]._replace(
            **{{"multiple_of": "divisor", "max_contiguous": "contiguity"}.get(text, "constancy"): _low_bit(value)}
        )
        is_kept &= _is_kept(np.moveaxis(np.asarray(data), at, -1), text, value, step)
    handle.data = _known(data, axes, data)
    if not is_kept:
        handle.data.wrong = f"{text}({', '.join(map(str, values))}){line_of()}"
        if text != "max_contiguous":  # an offset that wraps around at a size is usual, and wrong in vectors alone
            note_here("promise", f"{text}({', '.join(map(str, values))})")


def _is_kept(values: Any, text: str, promised: int, step: int) -> bool:
    """Return whether values keep a promise along the last axis, as far as vectors need it."""
    width = math.gcd(_low_bit(promised), _VECTOR, values.shape[-1])
    groups = values.reshape(*values.shape[:-1], -1, width)
    if text == "max_constancy":
        return bool((groups == groups[..., :1]).all())
    if text == "max_contiguous":
        return bool((groups - groups[..., :1] == np.arange(width, dtype=values.dtype) * values.dtype.type(step)).all())
    is_first = np.ones(values.shape, bool)
    is_first[..., 1:] = values[..., 1:] - values[..., :-1] != step
    return not bool((values[is_first] % min(promised, _VECTOR)).any())


class Vectors(NamedTuple):
    """Hold the addresses and the mask of an access of vectors, and the wrong promise that makes them."""

    addresses: Any
    mask: Any
    wrong: str


def vectors(what: str, addresses: Any, mask: Any, size: int) -> Vectors | None:
    """Return the access of vectors that a wrong promise makes of an access, if it differs.

    Args:
        what: `load` or `store`.
        size: bytes of an element.

    Raises:
        KernelFaultError: a vector that is accessed begins at no multiple of its bytes.
    """
    wrong = "".join(dict.fromkeys(each.wrong for each in (addresses, mask) if isinstance(each, _Known)))
    if not wrong or not isinstance(addresses, _Known) or not addresses.axes:
        return None
    at = max(range(addresses.ndim), key=lambda axis: (addresses.axes or ())[axis].contiguity)
    axis = addresses.axes[at]
    chosen = np.broadcast_to(np.asarray(mask), addresses.shape)
    constancy = _axes(mask, addresses.shape)[at].constancy
    width = math.gcd(axis.contiguity, max(1, axis.divisor // size), _VECTOR // size, constancy, addresses.shape[at])
    width = min(width, addresses.size // FOLLOWED.get())
    if width < 2:
        return None

    def first(values: Any) -> Any:
        moved = np.moveaxis(np.asarray(values), at, -1)
        groups = moved.reshape(*moved.shape[:-1], -1, width)
        return np.moveaxis(np.repeat(groups[..., 0], width, -1), -1, at)

    places = np.arange(addresses.shape[at], dtype=np.uint64).reshape([-1 if each == at else 1 for each in range(addresses.ndim)])
    begins, taken = first(addresses), first(chosen)
    of_vector = begins + places % np.uint64(width) * np.uint64(size)
    if (begins[taken] % np.uint64(width * size)).any():
        raise KernelFaultError(f"{what} of {width} elements at no multiple of {width * size} bytes, by {wrong}{line_of()}")
    if not ((of_vector != np.asarray(addresses)) & taken).any() and (taken == chosen).all():
        return None
    if what == "store":
        raise KernelFaultError(f"store of {width} elements to other addresses than the program's, by {wrong}{line_of()}")
    note_here("vector", wrong)
    return Vectors(of_vector, taken, wrong)
