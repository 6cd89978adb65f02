"""Define operators, variants, cases, and the configs of a variant.

All classes are frozen values.
"""

import dataclasses
import functools
import importlib.util
import itertools
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from kerneltune.errors import unknown
from kerneltune.identity import code_digest
from kerneltune.nearness import NO_BANDS, Bands

Config = Any
"""An instance of a variant's frozen config dataclass; its fields are the knobs."""
Inputs = Mapping[str, Any]
Outputs = Mapping[str, Any]
Space = Mapping[str, tuple[Any, ...]]
"""Knob -> its values; a config takes a single value of each knob."""
Option = bool | int | float | str
Role = Literal["", "own", "peer", "part"]
LARGEST_MEASURE = 1e15
"""Upper bound of every measured figure in µs, GB/s or per cent; in µs it is 30 years."""
_LARGEST = (1 << 63) - 1
Name = Annotated[str, Meta(min_length=1)]
Size = Annotated[int, Meta(ge=0, le=_LARGEST)]
Integer = Annotated[int, Meta(ge=-_LARGEST, le=_LARGEST)]
Measure = Annotated[float, Meta(ge=0, le=LARGEST_MEASURE)]
Knob = bool | Integer | float | str

GROUP, PLUGINS = "kerneltune.ops", "KERNELTUNE_PLUGINS"
"""Entry-point group and environment variable that name the operators of other packages."""

NO_OPTIONS: Mapping[str, tuple[Option, ...]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Case:
    """Describe a point of an operator's domain: axis sizes, element type, quantization mode and options.

    Attributes:
        name: a name for people. Two cases that differ in their names, or in the order of axes or options, are equal.
        axes: (axis, size) pairs in the operator's order.
        dtype: torch's name of the input type, for example `bfloat16`.
        quant: quantization mode; `none` without quantization.
        options: (option, value) pairs in the operator's order, with every option of the operator.
    """

    name: str
    axes: tuple[tuple[str, int], ...]
    dtype: str
    quant: str = "none"
    options: tuple[tuple[str, Option], ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Case) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[object, ...]:
        options = frozenset((name, type(value), value) for name, value in self.options)  # because True == 1
        return frozenset(self.axes), self.dtype, self.quant, options

    def __getitem__(self, axis: str) -> int:
        """Return the size of an axis."""
        return self.sizes[axis]

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each axis by name."""
        return dict(self.axes)

    def option(self, name: str) -> Option:
        """Return the value of an option."""
        return dict(self.options)[name]

    @property
    def label(self) -> str:
        """Return sizes, type, mode and options in one line: `M=8192 N=4096 bfloat16 fp8`."""
        sizes = " ".join(f"{axis}={size}" for axis, size in self.axes)
        options = "".join(f" {name}={value}" for name, value in self.options)
        return f"{sizes} {self.dtype} {self.quant}{options}"


class TaskRow(msgspec.Struct, kw_only=True):
    """Hold the names of a task's parts in a row of a file, without the operator; the case's name may be empty."""

    variant: Name
    case: str = ""
    axes: dict[str, Size]
    dtype: Name
    quant: Name
    options: dict[str, Knob]
    policy: Name


class TaskKey(NamedTuple):
    """Identify a task, and its configs, trials, records and misses: a variant of an operator on a case under a policy.

    An empty variant stands for all variants of the case.
    """

    op: str
    variant: str
    case: Case
    policy: str

    @classmethod
    def of(cls, op: str, row: Any) -> "TaskKey":
        """Make the key of a row, an object with the attributes of a `TaskRow`."""
        case = Case(row.case, tuple(row.axes.items()), row.dtype, row.quant, tuple(row.options.items()))
        return cls(op, row.variant, case, row.policy)

    @property
    def fields(self) -> dict[str, Any]:
        """Return the key as a row of a file has it, without the operator."""
        case = self.case
        return {
            "variant": self.variant, "case": case.name, "axes": case.sizes, "dtype": case.dtype, "quant": case.quant,
            "options": dict(case.options), "policy": self.policy,
        }  # fmt: skip

    @property
    def of_case(self) -> "TaskKey":
        """Return the key that all variants of the case share."""
        return TaskKey(self.op, "", self.case, self.policy)

    @property
    def label(self) -> str:
        """Name the task on one line, the case by its name: `swiglu optimized odd bfloat16 none`; an empty variant is left out."""
        names = (self.op, self.variant, self.case.name, self.case.dtype, self.case.quant)
        return " ".join(filter(None, names))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Hold the fewest bytes that an operator must move: each input is read once, each output is written once."""

    read: int
    write: int

    @property
    def total(self) -> int:
        """Return the sum of the bytes read and the bytes written."""
        return self.read + self.write


@dataclass(frozen=True)
class Variant:
    """Describe an implementation of an operator.

    Attributes:
        name: `baseline`, `optimized`, a further design, or the name of a peer.
        run: (inputs, config) -> outputs by name; allocates the outputs, launches kernels, and returns without synchronizing.
        config: the class of the configs, a dataclass; None if the variant has no knobs. A knob `ctas` is the number of programs
            that must be resident per SM, 0 for no minimum; a search drops a config if fewer programs fit.
        space: case -> values of every knob.
        invalid: (case, config) -> None if the config can run, else the reason why not. Searches and look-ups ask no other code.
        default: case -> the config for a case that the cache has no config for.
        unsupported: case -> None, or the reason why the variant does not support the case.
        requires: packages that must import; a variant that requires a package is a peer.
        promising: case -> configs of the space that every search tries, after the default.
        part: whether the variant does only a part of the operator's work; its time is then not compared with other variants'.
        compiles: whether the first call with a shape compiles for seconds; the first table then leaves the variant out.
    """

    name: str
    run: Callable[[Inputs, Config], Outputs]
    config: type[Any] | None = None
    space: Callable[[Case], Space] = lambda _case: {}
    invalid: Callable[[Case, Config], str | None] = lambda _case, _config: None
    default: Callable[[Case], Config] | None = None
    unsupported: Callable[[Case], str | None] = lambda _case: None
    requires: tuple[str, ...] = ()
    promising: Callable[[Case], tuple[Config, ...]] = lambda _case: ()
    part: bool = False
    compiles: bool = False

    @property
    def is_peer(self) -> bool:
        """Return whether another package implements this variant."""
        return bool(self.requires)

    @functools.cached_property
    def source_hash(self) -> str:
        """Return the digest of the code that decides results and speed of a config, see `identity.code_digest`."""
        return code_digest(self.run)

    @property
    def role(self) -> Role:
        """Return the variant's role in records: `own`, `peer` for another package's variant, or `part` for a part of the work."""
        if self.is_peer:
            return "peer"
        return "part" if self.part else "own"

    def missing(self) -> tuple[str, ...]:
        """Return the required packages that are not installed."""
        return missing_packages(self.requires)

    def default_config(self, case: Case) -> Config:
        """Return the default config; None for a variant without knobs."""
        return self.default(case) if self.default is not None else None

    def configs(self, case: Case) -> Iterator[Config]:
        """Return all valid configs of the space, in the order of the space."""
        if self.config is None:
            return
        space = self.space(case)
        for values in itertools.product(*space.values()):
            config = self.config(**dict(zip(space, values, strict=True)))
            if self.invalid(case, config) is None:
                yield config

    def config_from(self, values: Mapping[str, Any]) -> Config:
        """Make the config with these knob values."""
        if self.config is None:
            raise ValueError(f"variant {self.name} has no config, got {dict(values)}")
        try:
            return config_of_class(self.config, values)
        except ValueError as error:
            raise ValueError(f"config of {self.name}: {error}") from None

    def valid_config(self, case: Case, values: Mapping[str, Any]) -> Config | None:
        """Make the config with these knob values; return None for unknown knobs or a config that is not valid for the case.

        For values that no space has, such as tiles of 0 rows, `invalid` may raise ValueError or ArithmeticError: the result is
        None. Any other exception means a mistake in `invalid`, such as an axis that the case lacks, and is raised.
        """
        try:
            config = self.config_from(values)
            return config if self.invalid(case, config) is None else None
        except (ValueError, ArithmeticError):
            return None


def missing_packages(names: Iterable[str]) -> tuple[str, ...]:
    """Return the packages that are not installed."""

    def is_missing(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is None
        except ModuleNotFoundError:  # of the package that a module is in
            return True

    return tuple(filter(is_missing, names))


def config_of_class(config_class: Any, values: Mapping[str, Any]) -> Config:
    """Make the config of a class with these knob values; a knob that is newer than the stored values takes its default."""
    types = knobs_of_class(config_class)
    needed = {
        knob.name for knob in dataclasses.fields(config_class) if knob.default is knob.default_factory is dataclasses.MISSING
    }
    if not needed <= set(values) <= set(types):
        raise ValueError(f"expected the knobs {sorted(types)}, got {sorted(values)}")
    for name, value in values.items():
        if type(value) is not types[name]:
            raise ValueError(f"{name}: {value!r}: expected {getattr(types[name], '__name__', types[name])}")
    return config_class(**values)


@functools.cache
def knobs_of_class(config_class: Any) -> dict[str, Any]:
    """Return the type of every knob of a class, also with postponed annotations."""
    try:
        types = typing.get_type_hints(config_class)
    except NameError as error:
        raise ValueError(f"{config_class.__name__}: {error}") from error
    return {knob.name: types[knob.name] for knob in dataclasses.fields(config_class)}


@dataclass(frozen=True, eq=False)
class Op:
    """Describe an operator: the contract that its variants implement.

    Attributes:
        name: the operator's name in sweeps and caches.
        axes: names of the sizes of a case.
        dtypes: input element types, by torch's names.
        quants: quantization modes.
        options: option -> allowed values, the first is the default.
        free_axes: axes along which a cached config may serve another size.
        max_distance: largest sum of log2 distances along the free axes at which a cached config serves a case; the default
            serves cases farther away.
        free_options: options along which a cached config may serve another value at the same sizes, if the cache has no config
            for the case's own value.
        unseen_options: options that the arguments of a call do not tell, such as the distribution of tokens over groups; a call
            without `config=` looks up a config for their first value. None: all free options.
        as_called: case -> the case that a call without `config=` looks up; None for the case with first values of unseen options.
        bands: free axis -> the last size of each band except the last band; a cached config serves sizes of its own band only.
        policy: timing policy in place of `cold`; `eager` if no CUDA graph can hold a call.
        flops: case -> floating-point operations of one call, for a roofline; None for an operator that is only bound by memory.
        inputs: (case, device=…, seed=…) -> inputs by name; on device `meta` without values.
        reference: (inputs) -> outputs by name, plain torch, fp32 inside.
        compare: (case, inputs, outputs, reference outputs) -> a line per disagreement.
        traffic: case -> the fewest bytes that the operator must move.
        memory_factor: bytes of memory that a case needs per byte of traffic: inputs, outputs, the fp32 reference, its comparison.
        variants: implementations and peers, baseline first.
        module: package or module that holds the operator's source.
        weighs_hot: a search refuses a config that loses more with a hot L2 than it gains with a cold one, over the default.
        origin: arguments with which the module's `operators` makes the operator; None for an operator in `OPS`, or in
            `OP` of a module of this package.
    """

    name: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    inputs: Callable[..., Inputs]
    reference: Callable[[Inputs], Outputs]
    compare: Callable[[Case, Inputs, Outputs, Outputs], list[str]]
    traffic: Callable[[Case], Traffic]
    variants: tuple[Variant, ...]
    module: str
    quants: tuple[str, ...] = ("none",)
    options: Mapping[str, tuple[Option, ...]] = field(default_factory=lambda: NO_OPTIONS)
    free_axes: tuple[str, ...] = ()
    max_distance: float = 4.0
    free_options: tuple[str, ...] = ()
    unseen_options: tuple[str, ...] | None = None
    as_called: Callable[[Case], Case] | None = None
    bands: Bands = field(default_factory=lambda: NO_BANDS)
    policy: str = "cold"
    memory_factor: int = 8
    flops: Callable[[Case], int] | None = None
    weighs_hot: bool = False
    origin: tuple[Any, ...] | None = None

    @property
    def kind(self) -> Literal["shipped", "captured", "foreign"]:
        """Return whose the operator is: this package's, made of a capture, or a user's own, whose checks judge more."""
        if self.origin is not None:
            return "captured"
        return "shipped" if self.module.startswith("kerneltune.") else "foreign"

    def variant(self, name: str) -> Variant:
        """Return the variant with a name."""
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise unknown(f"{self.name}: variant", name, [variant.name for variant in self.variants])

    def case_of_call(self, case: Case) -> Case:
        """Return the case that a call without `config=` looks up: unseen options have their first value."""
        if self.as_called is not None:
            return self.as_called(case)
        unseen = self.free_options if self.unseen_options is None else self.unseen_options
        options = tuple((name, self.options[name][0] if name in unseen else value) for name, value in case.options)
        return dataclasses.replace(case, options=options)


def knob_order(value: Any) -> tuple[bool, bool, Any]:
    """Return the key by which values of a knob are sorted: None, numbers, then text."""
    return isinstance(value, str), value is not None, value


_BEYOND = 4
"""Factor by which a knob may lie above or below all values of its space: a config of another space stays valid."""
_MOST_WARPS = 32


def out_of_range(knobs: Mapping[str, Any], space: Space) -> str | None:
    """Return the first knob with a value that kernels of a space may not accept, with the value; None if there is none.

    A knob may have any value of the space, and any positive integer that is not far from the integers of the space. If all of
    these are powers of two, the integer must be a power of two.
    """
    for name, value in knobs.items():
        offered = space.get(name, (value,))
        if value not in offered and not _is_near(value, offered, _MOST_WARPS if name == "warps" else sys.maxsize):
            text = repr(value) if type(value) is not int or abs(value) < 1 << 64 else "a number of very many digits"
            shown = ", ".join(map(str, sorted(dict.fromkeys(offered), key=knob_order)[:8]))
            return f"{name}: {text[:60]}: expected a value like {shown}"
    return None


def _is_near(value: Any, offered: Iterable[Any], most: int) -> bool:
    """Return whether a value is a positive integer, at most `most`, that is not far from the offered integers."""
    if type(value) is not int or not 0 < value <= most:
        return False
    integers = [number for number in offered if type(number) is int]
    if all(map(_is_power_of_two, integers)) and not _is_power_of_two(value):
        return False
    return min(integers, default=0) // _BEYOND <= value <= max(integers, default=0) * _BEYOND


def _is_power_of_two(number: int) -> bool:
    return number >= 0 and number & (number - 1) == 0  # 0 counts too, because it often switches something off
