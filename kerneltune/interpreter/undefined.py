"""Make Triton's interpreter report undefined behaviour: wild accesses, races, undefined values, keywords and endless programs.

Every tensor argument gets its own region of addresses, so that the address of an access identifies its argument, however far the
access misses. An access outside of the argument's storage raises before memory is touched. Elements that a load's mask leaves
out hold garbage unless the load has an `other`, and a cast of NaN or of a value out of range to integers gives garbage. Two
programs that access an element without an order fail, see `races`. Tensors on device `meta` have addresses and no memory: a few
programs of a launch of any size run on them to check the addresses alone. The module knows no operator.
"""

import dataclasses
import functools
import itertools
import linecache
import math
import time
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import numpy as np

from kerneltune.interpreter.facts import WITHOUT_MEMORY, Fact, note_facts, note_here, noting, noting_draws
from kerneltune.interpreter.faults import (
    KernelFaultError,
    begin_time,
    causes,
    check_keywords,
    fault_of,
    line_of,
    place_that_runs,
    setting,
    statement,
    time_limit,
)
from kerneltune.interpreter.garbage import cast_to_integer, garbage
from kerneltune.interpreter.host_code import untraced
from kerneltune.interpreter.kernel_code import bound_arguments, cpu_tensors_of, facts_of, floats_of, names_of
from kerneltune.interpreter.last_elements import LastElements
from kerneltune.interpreter.loops import AROUND
from kerneltune.interpreter.promises import FOLLOWED, Vectors, follow_argument, makes_promises, vectors
from kerneltune.interpreter.races import Conflict, Races
from kerneltune.interpreter.regions import FAR, FIRST_REGION, LOADED, MORE, REGION_BITS, Integers, Region, places_text
from kerneltune.interpreter.wrapping import require_unwrapped

_MOST_PROGRAMS = (2**31 - 1, 65_535, 65_535)
"""Most programs along each axis of a grid on CUDA, which the launch of a larger grid refuses."""
_FindConflict = Callable[[int, int, Any, Any], Conflict | None]
_TOO_LARGE, _OVERFLOW = "exceeds triton maximum tensor numel", "overflow detected"
LAUNCH_SECONDS = 2.0
"""Processor time for each run of the programs of a launch without memory: a program may wait for a value for ever."""
_NARROW = 16
"""Bits of the largest elements whose casts of integers are judged."""

UNORDERED = "# unordered:"
"""Comment at a load or a store which says why programs may access its elements without an order."""


class _Loading(NamedTuple):
    """Describe the load that runs.

    Attributes:
        has_other: whether elements that the mask leaves out have a value.
        is_volatile: whether the load waits for other programs.
        is_shared: whether the load bypasses L1, so that it sees the results of atomics of other programs.
    """

    has_other: bool = False
    is_volatile: bool = False
    is_shared: bool = False


class NotJudgedError(Exception):
    """Report that a launch without memory cannot be judged: it takes too long, waits for values, or loads addresses."""


def strict_parts(largest: Mapping[tuple[str, str], int]) -> dict[tuple[Any, str], Any]:
    """Return the parts of the interpreter, (owner, name), that are replaced in the mode `modes.strict`."""
    from triton.language import random
    from triton.runtime import interpreter

    guard = _Guard(interpreter, largest)
    methods: dict[tuple[Any, str], Callable[..., Any]] = {
        (interpreter.GridExecutor, "_init_args_hst"): guard.name_arguments,
        (interpreter.GridExecutor, "__call__"): guard.launch,
        (interpreter.InterpreterBuilder, "set_grid_dim"): guard.begin_launch,
        (interpreter.InterpreterBuilder, "set_grid_idx"): guard.begin_program,
        (interpreter.TritonSemantic, "load"): guard.note_options_of_load,
        (interpreter.InterpreterBuilder, "create_masked_load"): guard.load_under_mask,
        (interpreter.TritonSemantic, "store"): guard.store_integers,
    }
    return {
        **{(owner, name): _around(getattr(owner, name), function) for (owner, name), function in methods.items()},
        (interpreter, "_implicit_cvt"): guard.converted,
        (interpreter, "_interpreter"): guard,
        (random, "philox_impl"): noting_draws(random.philox_impl, lambda state: guard._races.is_drawn(state)),
        (interpreter.InterpreterBuilder, "create_assert"): _asserted,
        (interpreter.InterpreterBuilder, "create_fp_to_si"): cast_to_integer,
        (interpreter.InterpreterBuilder, "create_fp_to_ui"): cast_to_integer,
        (interpreter.InterpreterBuilder, "create_int_cast"): _cast_of_integer,
        (interpreter.InterpreterBuilder, "create_si_to_fp"): _cast_of_integer,
        (interpreter.InterpreterBuilder, "create_ui_to_fp"): _cast_of_integer,
        (interpreter.interpreter_builder, "options"): dataclasses.replace(interpreter.interpreter_builder.options, debug=True),
    }


def _around(method: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls a function with the former method, bound to its owner, and the arguments."""
    return lambda owner, *args, **kwargs: function(MethodType(method, owner), *args, **kwargs)


class _Guard:
    """Guard the launch that runs: hold the regions of its arguments, and check each access of its programs.

    Public methods stand for methods of the interpreter, which they take, or for functions of Triton's native module.
    """

    def __init__(self, interpreter: Any, largest: Mapping[tuple[str, str], int]) -> None:
        self._interpreter, self._native, self._largest = interpreter, interpreter._interpreter, largest
        self._convert: Callable[[Any], Any] = interpreter._implicit_cvt
        self._names: dict[int, str] = {}
        self._regions: list[Region] = []
        self._grid: tuple[int, ...] = (1, 1, 1)
        self._kernel = ""
        self._races = Races(0)
        self._last_elements = LastElements(0)
        self._program_number = 0
        self._unjudged = ""
        self._loading, self._integers = _Loading(), Integers()
        self.deadline = 0.0

    def name_arguments(self, arguments: Any, args: Any, kwargs: Any) -> Any:
        """Remember the name of every tensor argument."""
        positional, named = arguments(args, kwargs)
        self._regions.clear()
        in_order = zip(arguments.__self__.arg_names, positional, strict=False)
        self._names = names_of([*in_order, *named.items()])
        return positional, named

    def begin_launch(self, set_grid_dim: Any, *sizes: int) -> None:
        """Note the grid of a launch."""
        set_grid_dim(*sizes)
        self._grid = tuple(int(size) for size in sizes)  # a grid computed from arguments holds tensors
        for axis, (size, most) in enumerate(zip(self._grid, _MOST_PROGRAMS, strict=True)):
            if size > 1:
                note_facts(Fact("two programs", self._kernel, str(axis)))
            if size > most:
                raise KernelFaultError(f"grid of {self._kernel}: {size} programs along axis {axis}: a GPU takes at most {most}")
        num_programs = math.prod(self._grid)
        self._races, self._last_elements = Races(num_programs), LastElements(num_programs)

    def begin_program(self, set_grid_idx: Any, *place: int) -> None:
        """Note the program that begins, and the time."""
        at = place_that_runs(place, self._grid)
        set_grid_idx(*at)
        begin_time()
        AROUND.set(1)
        self._program_number = (at[0] * self._grid[1] + at[1]) * self._grid[2] + at[2]
        self._races.begin_program(self._program_number)

    def note_options_of_load(self, load: Any, pointer: Any, mask: Any, other: Any, *rest: Any) -> Any:
        """Note a load's options, which the interpreter's own code drops."""
        *_, is_volatile = rest
        cache = str(rest[2]) if len(rest) > 2 else rest[0].cache_modifier  # Triton 3.9 has a policy in place of four options
        self._loading = _Loading(
            has_other=other is not None, is_volatile=bool(is_volatile), is_shared=cache.endswith(("cg", "cv"))
        )
        try:
            return load(pointer, mask, other, *rest)
        finally:
            self._loading = _Loading()

    def load_under_mask(self, masked_load: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        """Load garbage for elements that the mask leaves out, unless the load has an `other`."""
        taken = np.asarray(mask.data)  # of a block pointer, a plain array whose `data` is its memory
        if other is None and not self._loading.has_other and not taken.all():
            kind = pointers.get_element_ty()
            place = note_here("garbage")
            other = self._interpreter.TensorHandle(garbage(taken, kind, self._interpreter._get_np_dtype(kind), place), kind)
        return masked_load(pointers, mask, other, *rest, **named)

    def store_integers(self, store: Any, pointer: Any, values: Any, mask: Any, *rest: Any) -> Any:
        """Store values; without memory, integers must fit the argument's elements, to which Triton casts them.

        Elsewhere the results are compared, and a kernel may store the low bits of a word.

        Raises:
            KernelFaultError: a number is neither a signed nor an unsigned number of the element's bits.
        """
        kind = pointer.dtype.scalar.element_ty
        if WITHOUT_MEMORY.get() and kind.is_int() and values.dtype.is_int() and 1 < kind.int_bitwidth < values.dtype.int_bitwidth:
            numbers, is_stored = np.broadcast_arrays(values.handle.data, True if mask is None else mask.handle.data)
            is_wide = is_stored & (np.abs(numbers >> (kind.int_bitwidth - 1)) > 1)
            if is_wide.any():
                raise KernelFaultError(f"store of {numbers[is_wide].flat[0]} to elements of {kind}{self._here()}")
        return store(pointer, values, mask, *rest)

    def launch(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Launch a kernel; on device `meta`, the programs at the corners of the grid alone. Kernels are not traced."""
        with untraced(), time_limit(lambda: f"{self._kernel}: {self._program()}"):
            return self._launch(call, *args, **kwargs)

    def _launch(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        executor = call.__self__
        check_keywords(executor, kwargs)
        self._kernel = executor.fn.__name__
        FOLLOWED.set(32 * (kwargs.get("num_warps") or 4) * makes_promises(executor.fn))
        bound = bound_arguments(executor, args, kwargs)
        note_facts(*facts_of(executor, bound), *floats_of(bound))
        if not any(getattr(value, "is_meta", False) for arg in bound.values() for value in (arg, getattr(arg, "base", None))):
            result = call(*args, **kwargs)
            self._races.end_launch()
            note_facts(*self._last_elements.facts(self._kernel))
            return result
        note_facts(*cpu_tensors_of(self._kernel, bound))
        self._names = names_of(bound.items())
        scope = self._interpreter._patch_lang(executor.fn)
        try:
            with setting(WITHOUT_MEMORY, True):
                self._unjudged = self._unjudged or self._judge_corners(executor, bound)
            if self._unjudged:
                note_facts(Fact("not judged", f"addresses of {self._kernel}: {self._unjudged}", self._kernel))
        finally:
            scope.restore()

    def _judge_corners(self, executor: Any, bound: dict[str, Any]) -> str:
        """Run the programs at the corners with each of _LOADED; raise the first error if every run has an error.

        Return why the launch was not judged, empty if it was. A launch that was not judged raises no error.
        """
        faults: list[Exception] = []
        if any((self._kernel, name) in self._largest for name in bound):
            self._judge_offsets(executor, bound)
        for integers in map(Integers, LOADED):
            try:
                self._run_corners(executor, bound, integers)
                others = [last_elements := self._last_elements]
                if integers.are_loaded:
                    others = self._with_number(executor, bound, MORE) or [LastElements(0)]
                    others += self._with_number(executor, bound, FAR)
                note_facts(*last_elements.facts(self._kernel, others))
                return ""
            except Exception as error:  # Triton raises its own error from a fault; any other error of the first run goes on
                if _TOO_LARGE in str(error):
                    raise KernelFaultError(f"{self._kernel}: a block of this size does not compile: {error}") from error
                if reason := next((str(cause) for cause in causes(error) if isinstance(cause, NotJudgedError)), ""):
                    return reason
                if fault_of(error) is None and not faults:
                    raise
                faults.append(error)
        raise faults[0]

    def _judge_offsets(self, executor: Any, bound: dict[str, Any]) -> None:
        """Run the programs at the corners with integers up to the largest; raise the error of an overflow alone.

        Integers without a limit are 0 in the first run. Because programs may end by them, they are large in further runs: first
        tensors of one integer, as counts are, then all. An overflow that also occurs where the integers with a limit are 0 is due
        to the other integers, and no error.
        """
        has_unknown = False
        for most_unknown in (0, 1, _MOST_PROGRAMS[0]):
            integers = Integers(rise=1.0, most_unknown=most_unknown)
            fault = self._overflow(executor, bound, integers)
            if fault and not (most_unknown and self._overflow(executor, bound, Integers(rise=0.0, most_unknown=most_unknown))):
                raise KernelFaultError(fault)
            has_unknown |= integers.have_unknown
            if not has_unknown:
                return

    def _overflow(self, executor: Any, bound: dict[str, Any], integers: Integers) -> str:
        """Return the error of an overflow at the corners with the integers that have limits; empty without an overflow."""
        try:
            self._run_corners(executor, bound, integers)
        except Exception as error:  # Triton raises its own error from a fault
            if _OVERFLOW in (fault := str(fault_of(error))):
                limited = [each for each in self._regions if each.largest is not None]
                return f"{fault}, with {' and '.join(f'{each.name} up to {each.largest}' for each in limited)}"
        return ""

    def _run_corners(self, executor: Any, bound: dict[str, Any], integers: Integers) -> None:
        self._integers = integers
        self._regions.clear()
        self.deadline = time.thread_time() + LAUNCH_SECONDS
        values = {name: value if name in executor.constexprs else self.converted(value) for name, value in bound.items()}
        grid = executor.grid(values) if callable(executor.grid) else executor.grid
        grid = (*map(int, grid), 1, 1)[:3]
        builder = self._interpreter.interpreter_builder
        builder.set_grid_dim(*grid)
        corners = (sorted({0, size // 2, size - 1}, reverse=True) for size in grid)  # the last may take all time
        for program in itertools.product(*corners) if min(grid) > 0 else ():
            builder.set_grid_idx(*program)
            executor.fn(**values)

    def _with_number(self, executor: Any, bound: dict[str, Any], number: int) -> list[LastElements]:
        """Return the accesses of the corners where loads give a number; none if this run cannot end."""
        try:
            with noting(passes_on=False):
                self._run_corners(executor, bound, Integers(number))
        except Exception:  # the number lies outside of an argument, or the time is over
            return []
        return [self._last_elements]

    def converted(self, value: Any) -> Any:
        """Stand for _implicit_cvt: give a tensor addresses in a region of its own."""
        argument = self._convert(value)
        if not hasattr(value, "data_ptr"):
            follow_argument(argument)
            return argument
        tensor = getattr(value, "base", value) if type(value).__name__ == "TensorWrapper" else value
        name = self._names.get(id(value), f"argument {len(self._regions)}")
        region = Region.of(tensor, len(self._regions), name, self._largest.get((self._kernel, name)))
        self._regions.append(region)
        argument.handle.data = np.array([region.start], dtype=np.uint64)
        follow_argument(argument)
        return argument

    def __getattr__(self, name: str) -> Any:
        """Return a function of the native module that accesses no memory."""
        return getattr(self._native, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """Load from checked addresses; a volatile load waits for other programs, so that it races with nothing."""

        def find_conflict(storage: int, size: int, at: Any, chosen: Any) -> Conflict | None:
            if self._loading.is_volatile:
                self._races.acquire([storage + int(byte) for byte in at[:1]])
                return None
            return self._races.load(storage, size, at, chosen, np.dtype(dtype).itemsize, line_of(), self._loading.is_shared)

        kind = np.dtype(dtype)
        is_index = kind.kind in "iu" and kind.itemsize >= 4
        self._integers.are_loaded |= is_index
        taken = vectors("load", addresses, mask, kind.itemsize)
        real = self._checked("load", addresses, mask, kind.itemsize, find_conflict)
        if real is None:  # `other` may decide which elements a kernel reads next
            loaded = np.broadcast_to(self._integers.values(addresses, self._region_of) if is_index else 0, addresses.shape)
            return np.where(mask, loaded.astype(dtype), other).astype(dtype)
        if taken is not None:
            return self._load_vectors(real - addresses, taken, other, kind)
        return self._native.load(real, mask, other, dtype)

    def _region_of(self, addresses: Any) -> Region:
        return self._regions[(int(addresses.flat[0]) >> REGION_BITS) - FIRST_REGION]

    def _load_vectors(self, offset: Any, taken: Vectors, other: Any, kind: Any) -> Any:
        """Load what a GPU loads by vectors; outside of the argument, garbage."""
        region = self._region_of(taken.addresses)
        is_inside = taken.addresses - np.uint64(region.first) <= np.uint64(max(0, region.size - kind.itemsize))
        outside = np.full(taken.addresses.nbytes // 8 * kind.itemsize, 0x7F, np.uint8).view(kind).reshape(is_inside.shape)
        other = np.where(taken.mask, outside, other).astype(kind)
        return self._native.load(offset + taken.addresses, taken.mask & is_inside, other, kind)

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        """Store to checked addresses."""

        def find_conflict(storage: int, size: int, at: Any, chosen: Any) -> Conflict | None:
            def is_changed() -> Any:
                zeros, everywhere = np.zeros(at.shape, values.dtype), np.ones(at.shape, bool)
                stored = self._native.load(at + np.uint64(storage), everywhere, zeros, values.dtype)
                bits = f"u{values.dtype.itemsize}"
                return stored.view(bits) != values[chosen].view(bits)

            return self._races.store(storage, size, at, chosen, values.dtype.itemsize, line_of(), is_changed)

        vectors("store", addresses, mask, values.dtype.itemsize)
        real = self._checked("store", addresses, mask, values.dtype.itemsize, find_conflict)
        return None if real is None else self._native.store(real, values, mask)

    def atomic_rmw(self, operation: Any, addresses: Any, values: Any, mask: Any, semantics: Any) -> Any:
        """Update checked addresses."""
        real = self._atomic(addresses, mask, values, semantics)
        return np.zeros_like(values) if real is None else self._native.atomic_rmw(operation, real, values, mask, semantics)

    def atomic_cas(self, addresses: Any, expected: Any, values: Any, semantics: Any) -> Any:
        """Update checked addresses."""
        real = self._atomic(addresses, np.ones_like(addresses, dtype=bool), values, semantics)
        return np.zeros_like(values) if real is None else self._native.atomic_cas(real, expected, values, semantics)

    def _atomic(self, addresses: Any, mask: Any, values: Any, semantics: Any) -> Any:
        """Return the addresses in memory of an atomic."""
        kind, item_size = str(semantics).rpartition(".")[2].upper(), values.dtype.itemsize

        def find_conflict(storage: int, size: int, at: Any, _mask: Any) -> Conflict | None:
            acquires, releases = kind.startswith("ACQUIRE"), kind.endswith("RELEASE")
            return self._races.atomic(storage, size, at, item_size, line_of(), acquires, releases)

        return self._checked("atomic", addresses, mask, item_size, find_conflict)

    def _checked(self, what: str, addresses: Any, mask: Any, item_size: int, find_conflict: _FindConflict) -> Any:
        """Return the addresses in memory of an access; None for a tensor without memory.

        Args:
            find_conflict: (address and size of a storage, its bytes that are accessed, mask) -> the conflict with another
                program.

        Raises:
            KernelFaultError: an element that the mask lets through lies outside of its argument, or another program's access to
                it has no order.
        """
        if not addresses.size or int(addresses.flat[0]) >> REGION_BITS < FIRST_REGION:
            if any(region.is_meta for region in self._regions):
                raise NotJudgedError("it loads addresses, which are unknown without memory")
            return addresses
        number = (int(addresses.flat[0]) >> REGION_BITS) - FIRST_REGION
        region = self._regions[number] if number < len(self._regions) else None
        at = addresses - np.uint64(region.first if region else 0)  # below the region, a difference wraps around
        mask = np.asarray(mask)  # of a block pointer, the memory of an array
        accessed = at if mask.all() else at[mask]
        require_unwrapped(accessed, self._here)
        furthest = int(accessed.max()) if accessed.size else -item_size  # an empty tensor may be behind a mask of False
        if region is None or furthest > region.size - item_size:
            if region is None or (addresses >> np.uint64(REGION_BITS) != number + FIRST_REGION).any():
                return self._checked_by_region(what, addresses, mask, item_size, find_conflict)
            last = region.size - item_size
            first = addresses[mask][0 if last < 0 else int((accessed > np.uint64(last)).argmax())]
            raise KernelFaultError(f"{what} outside of {region.element(int(first))}{self._here()}")
        if what != "atomic" and accessed.size:
            self._last_elements.note(what, self._program_number, region, accessed, furthest)
        if region.is_meta:
            if time.thread_time() > self.deadline:
                raise NotJudgedError(f"{LAUNCH_SECONDS:g} s are over")
            return None
        is_waiting = what == "load" and self._loading.is_volatile
        if what == "atomic" or is_waiting or not _is_unordered(*statement()):
            conflict = find_conflict(region.first + region.offset, region.size, accessed.reshape(-1), mask)
            if conflict is not None:
                raise self._race(what, region, conflict)
        return addresses + np.uint64(region.offset % (1 << 64))

    def _checked_by_region(self, what: str, addresses: Any, mask: Any, item_size: int, find_conflict: _FindConflict) -> Any:
        """Check an access to several regions, region by region."""
        real, numbers = np.zeros_like(addresses), addresses >> np.uint64(REGION_BITS)
        mask = np.broadcast_to(mask, addresses.shape)
        for number in np.unique(numbers[mask]):
            if number >= FIRST_REGION + len(self._regions):
                raise KernelFaultError(f"{what} outside of every argument{self._here()}")
            chosen = mask & (numbers == number)
            in_region = np.where(chosen, addresses, addresses[chosen][0])
            real_in_region = self._checked(what, in_region, chosen, item_size, find_conflict)
            if real_in_region is None:
                return None
            real[chosen] = real_in_region[chosen]
        return real

    def _here(self) -> str:
        """Return the program and the line that run."""
        return f", {self._program()}{line_of()}"

    def _program(self) -> str:
        return f"program {places_text(self._interpreter.interpreter_builder.grid_idx)}"

    def _race(self, what: str, region: Region, conflict: Conflict) -> KernelFaultError:
        """Return the error of two programs that access an element without an order."""
        number, place = conflict.program, []
        for size in reversed(self._grid):
            number, at = divmod(number, size)
            place.append(at)
        are_stores = what == conflict.kind == "store"
        verbs = [kind.replace("atomic", "atomically update") for kind in (conflict.kind, what)]
        accesses = "store different values to" if are_stores else f"{' and '.join(verbs)} without an order of"
        return KernelFaultError(
            f"two programs {accesses} {region.element(region.first + conflict.at)}: "
            f"program {places_text(reversed(place))}{conflict.line}; {self._program()}{line_of()}"
        )


@functools.cache
def _is_unordered(file: str, line: int) -> bool:
    """Return whether the comment UNORDERED is at a line."""
    return UNORDERED in linecache.getline(file, line)


def _asserted(_builder: Any, condition: Any, message: str) -> None:
    """Stand for InterpreterBuilder.create_assert: check Triton's assertions of integer overflow and the kernel's assertions."""
    if not np.all(getattr(condition, "data", condition)):
        raise KernelFaultError(f"{message}{line_of()}")


def _cast_of_integer(builder: Any, source: Any, target: Any, *_is_signed: Any) -> Any:
    """Stand for InterpreterBuilder.create_int_cast, create_si_to_fp and create_ui_to_fp: note numbers that do not fit 16 bits."""
    result, kind = builder.cast_impl(source, target), target.scalar
    if 1 < kind.primitive_bitwidth <= _NARROW < 8 * source.data.dtype.itemsize:
        numbers = source.data.astype(np.int64)
        digits = np.abs(numbers) // np.maximum(numbers & -numbers, 1)  # without the zeros at the end of the number in binary
        is_changed = result.data != numbers if kind.is_int() else digits >> kind.fp_mantissa_width + 1 > 0
        if is_changed.any() or (kind.is_fp16() and (np.abs(numbers) > np.finfo(np.float16).max).any()):
            note_here("lossy cast", kind.name)
    return result
