"""Find accesses outside of tensors and integer overflow in kernels that Triton's interpreter runs.

Every tensor argument gets addresses of its own, so that an access tells which argument it was made from, however far off it
is. An access outside of the argument's storage raises before memory is touched. Tensors on device `meta` have addresses and
no memory: with them a few programs of a launch of any size are run for their addresses alone. Knows no operator.
"""

import dataclasses
import inspect
import itertools
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_REGION_BITS = 46
"""log2 of the bytes of addresses per argument: 64 TiB, more than a 64-bit offset reaches by a bug of 32-bit arithmetic."""
_FIRST_REGION = 1 << 4
"""Regions below are addresses of this process, which a kernel may load from a table: such accesses are not judged."""
_ALIGNMENT = 4096
_LAUNCH_SECONDS = 2.0
"""Time for one launch without memory: programs that wait for a value would wait for ever."""


class KernelFaultError(Exception):
    """A kernel accesses memory outside of an argument, overflows an integer, or breaks an assertion of its own; one line."""


@dataclass(frozen=True, slots=True)
class _Region:
    """The addresses of one tensor argument.

    Attributes:
        is_meta: the tensor has no memory.
        first, size: address and bytes of the argument's storage.
        offset: what is added to an address of the region for the address in memory.
        start: address of the argument's first element, in the region.
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


class NotJudgedError(Exception):
    """A launch without memory takes too long: it waits for values, or its programs have too much to do."""


@contextmanager
def guarded() -> Iterator[None]:
    """Raise KernelFaultError where an interpreted kernel leaves an argument's storage or overflows; nothing on a GPU.

    The error is raised inside of the kernel; Triton wraps it in its own, which has it as its cause. Of a launch with tensors on
    device `meta` the programs at the corners of the grid run; loads give zeros.
    """
    from triton import knobs

    if not knobs.runtime.interpret:
        yield
        return
    from triton.runtime import interpreter

    guard = _Guard(interpreter)
    replaced = {
        (interpreter, "_implicit_cvt"): guard.converted,
        (interpreter, "_interpreter"): _Accesses(interpreter._interpreter, guard),
        (interpreter.GridExecutor, "_init_args_hst"): guard.named_arguments,
        (interpreter.GridExecutor, "__call__"): guard.sampled,
        (interpreter.InterpreterBuilder, "create_assert"): _asserted,
        (interpreter.interpreter_builder, "options"): dataclasses.replace(interpreter.interpreter_builder.options, debug=True),
    }
    before = {place: getattr(*place) for place in replaced}
    try:
        for (owner, name), value in replaced.items():
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in before.items():
            setattr(owner, name, value)


class _Guard:
    """The regions of the kernel that runs."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter = interpreter
        self._convert: Callable[[Any], Any] = interpreter._implicit_cvt
        self._arguments: Callable[..., Any] = interpreter.GridExecutor._init_args_hst
        self._call: Callable[..., Any] = interpreter.GridExecutor.__call__
        self._names: dict[int, str] = {}
        self._regions: list[_Region] = []
        self.deadline = 0.0

    @property
    def named_arguments(self) -> Callable[..., Any]:
        """Stand for GridExecutor._init_args_hst: remember the name of every tensor argument."""
        guard = self

        def init(executor: Any, args: Any, kwargs: Any) -> Any:
            positional, named = guard._arguments(executor, args, kwargs)
            guard._regions.clear()
            guard._names = {
                id(value): name for name, value in (*zip(executor.arg_names, positional, strict=False), *named.items())
            }
            return positional, named

        return init

    @property
    def sampled(self) -> Callable[..., Any]:
        """Stand for GridExecutor.__call__: launch on device `meta` the programs at the corners of the grid alone."""
        guard = self

        def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
            if not any(getattr(value, "is_meta", False) for value in (*args, *kwargs.values())):
                return guard._call(executor, *args, **kwargs)
            guard.deadline = time.monotonic() + _LAUNCH_SECONDS
            names = inspect.getfullargspec(executor.fn).args
            given = {name: value for name, value in kwargs.items() if name in names}
            guard._regions.clear()
            bound = inspect.getcallargs(executor.fn, *args, **given)
            guard._names = {id(value): name for name, value in bound.items()}
            scope = guard._interpreter._patch_lang(executor.fn)
            try:
                guard._run_corners(executor, bound)
            finally:
                scope.restore()

        return call

    def _run_corners(self, executor: Any, bound: dict[str, Any]) -> None:
        values = {name: value if name in executor.constexprs else self.converted(value) for name, value in bound.items()}
        grid = executor.grid(values) if callable(executor.grid) else executor.grid
        grid = (*grid, 1, 1)[:3]
        builder = self._interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        for program in itertools.product(*(sorted({0, size // 2, size - 1}) for size in grid)):
            if min(grid) > 0:
                builder.set_grid_idx(*program)
                with warnings.catch_warnings():  # of numpy: values are of no account here, and most are not known
                    warnings.simplefilter("ignore", RuntimeWarning)
                    executor.fn(**values)

    def converted(self, value: Any) -> Any:
        """Stand for _implicit_cvt: give a tensor addresses in a region of its own."""
        found = self._convert(value)
        if not hasattr(value, "data_ptr"):
            return found
        tensor = getattr(value, "base", value) if type(value).__name__ == "TensorWrapper" else value
        storage = tensor.untyped_storage()
        region_start = (_FIRST_REGION + len(self._regions)) << _REGION_BITS
        middle = region_start + (1 << (_REGION_BITS - 1)) + (0 if tensor.is_meta else storage.data_ptr() % _ALIGNMENT)
        offset = (0 if tensor.is_meta else storage.data_ptr()) - middle
        start = middle + tensor.storage_offset() * tensor.element_size()
        self._regions.append(
            _Region(
                tensor.is_meta,
                self._names.get(id(value), f"argument {len(self._regions)}"), str(tensor.dtype), tensor.element_size(),
                tuple(tensor.shape), tuple(tensor.stride()), middle, storage.nbytes(), offset, start,
            )
        )  # fmt: skip
        found.handle.data = np.array([start], dtype=np.uint64)
        return found

    def real(self, what: str, addresses: Any, mask: Any, item_size: int) -> Any:
        """Return the addresses in memory of an access; None for a tensor without memory.

        Raises:
            KernelFaultError: an element that the mask lets through lies outside of its argument.
        """
        if not addresses.size or int(addresses.flat[0]) >> _REGION_BITS < _FIRST_REGION:
            return addresses
        number = (int(addresses.flat[0]) >> _REGION_BITS) - _FIRST_REGION
        if number >= len(self._regions) or bool((addresses >> np.uint64(_REGION_BITS) != number + _FIRST_REGION).any()):
            return self._each(what, addresses, mask, item_size)
        region = self._regions[number]
        at = addresses - np.uint64(region.first)
        outside = mask & (at > np.uint64(max(0, region.size - item_size))) if region.size >= item_size else mask
        if outside.any():
            raise self._error(what, region, int(addresses[outside].flat[0]))
        if region.is_meta:
            if time.monotonic() > self.deadline:
                raise NotJudgedError(f"{_LAUNCH_SECONDS:g} s are over")
            return None
        return addresses + np.uint64(region.offset % (1 << 64))

    def _each(self, what: str, addresses: Any, mask: Any, item_size: int) -> Any:
        """Treat an access to several regions one element after the other."""
        found = np.zeros_like(addresses)
        mask = np.broadcast_to(mask, addresses.shape)
        for place in np.ndindex(addresses.shape):
            if mask[place]:
                one = self.real(what, np.array([addresses[place]], dtype=np.uint64), np.array([True]), item_size)
                if one is None:
                    return None
                found[place] = one[0]
        return found

    def _error(self, what: str, region: _Region, address: int) -> KernelFaultError:
        index = (address - region.start) // region.item_size
        of = "x".join(map(str, region.shape)) or "scalar"
        program = ", ".join(map(str, self._interpreter.interpreter_builder.grid_idx))
        place = _index(index, region)
        where = f" {place}" if place else ""
        return KernelFaultError(
            f"{what} outside of {region.name}: element {index}{where} of {of} {region.dtype.removeprefix('torch.')}, "
            f"program ({program}){_line()}"
        )


class _Accesses:
    """Stand for Triton's native module: the same functions, their addresses checked."""

    def __init__(self, native: Any, guard: _Guard) -> None:
        self._native, self._guard = native, guard

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """Load from checked addresses."""
        real = self._guard.real("load", addresses, mask, np.dtype(dtype).itemsize)
        if real is None:
            return np.zeros(addresses.shape, dtype)
        return self._native.load(real, mask, other, dtype)

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        """Store to checked addresses."""
        real = self._guard.real("store", addresses, mask, values.dtype.itemsize)
        return self._native.store(real, values, mask) if real is not None else None

    def atomic_rmw(self, operation: Any, addresses: Any, values: Any, mask: Any, semantics: Any) -> Any:
        """Update checked addresses."""
        real = self._guard.real("atomic", addresses, mask, values.dtype.itemsize)
        return self._native.atomic_rmw(operation, real, values, mask, semantics) if real is not None else np.zeros_like(values)

    def atomic_cas(self, addresses: Any, expected: Any, values: Any, semantics: Any) -> Any:
        """Update checked addresses."""
        every = np.ones_like(addresses, dtype=bool)
        real = self._guard.real("atomic", addresses, every, values.dtype.itemsize)
        return self._native.atomic_cas(real, expected, values, semantics) if real is not None else np.zeros_like(values)


def _asserted(_builder: Any, condition: Any, message: str) -> None:
    """Stand for InterpreterBuilder.create_assert: Triton asserts that integers do not overflow, and kernels what they like."""
    if not np.all(getattr(condition, "data", condition)):
        raise KernelFaultError(f"{message}{_line()}")


def _index(element: int, region: _Region) -> str:
    """Return `(row, column)` of an element of a tensor whose strides fall; empty where there is none."""
    if len(region.strides) < 2 or 0 in region.strides or list(region.strides) != sorted(region.strides, reverse=True):
        return ""
    places = []
    for stride in region.strides:
        place, element = divmod(element, stride)
        places.append(place)
    return f"at ({', '.join(map(str, places))})"


def _line() -> str:
    """Return `, FILE:LINE` of the kernel's statement that runs."""
    frames = traceback.extract_stack()
    ours = [frame for frame in frames if "/triton/" not in frame.filename and frame.filename != __file__]
    return f", {Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else ""
