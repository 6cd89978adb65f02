"""The nouns: Op, Variant, Case, and the configs of a variant.

Frozen values. Does not measure, tune or print. Imports the standard library, errors, identity and nearness.
"""

import dataclasses
import functools
import importlib.util
import itertools
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, cast

from kerneltune.errors import unknown
from kerneltune.identity import code_digest
from kerneltune.nearness import NO_BANDS, Bands

Config = Any
"""An instance of a variant's frozen config dataclass; its fields are the knobs."""
Inputs = Mapping[str, Any]
Outputs = Mapping[str, Any]
Space = Mapping[str, tuple[Any, ...]]
"""The values of every knob; a config takes one of each."""
Option = bool | int | float | str
Role = Literal["", "own", "peer", "part"]
MOST = 1e15
"""More than any µs, GB/s or per cent that is measured: 30 years."""

GROUP, PLUGINS = "kerneltune.ops", "KERNELTUNE_PLUGINS"
"""The entry-point group and the environment variable that name operators of other packages."""

_SHORT_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16", "fp32": "float32", "f32": "float32",
    "float": "float32", "e4m3": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip

NO_OPTIONS: Mapping[str, tuple[Option, ...]] = MappingProxyType({})


def dtype_name(text: str) -> str:
    """Return torch's name of an element type that is given in short: `bf16` is `bfloat16`; any other text as it is."""
    name = text.removeprefix("torch.")
    return _SHORT_DTYPES.get(name.lower(), name)


def short_dtype(name: str) -> str:
    """Return the short name of an element type, `bf16` of `bfloat16`; the name itself where it has none."""
    return next((short for short, whole in _SHORT_DTYPES.items() if whole == name), name)


@dataclass(frozen=True, slots=True)
class Case:
    """One point of an operator's domain: axis sizes, element type, quantisation mode and options.

    Attributes:
        name: what people call it; no part of its identity.
        axes: (axis, size) pairs in the operator's order.
        dtype: torch's name of the input type, for example `bfloat16`.
        quant: quantisation mode; `none` where there is no quantisation.
        options: (option, value) pairs in the operator's order, every option given.
    """

    name: str = field(compare=False)
    axes: tuple[tuple[str, int], ...]
    dtype: str
    quant: str = "none"
    options: tuple[tuple[str, Option], ...] = ()

    def __getitem__(self, axis: str) -> int:
        """Return the size of an axis."""
        return dict(self.axes)[axis]

    def option(self, name: str) -> Option:
        """Return the value of an option."""
        return dict(self.options)[name]

    @property
    def label(self) -> str:
        """Sizes, type, mode and options in one line: `M=8192 N=4096 bfloat16 fp8`."""
        sizes = " ".join(f"{axis}={size}" for axis, size in self.axes)
        options = "".join(f" {name}={value}" for name, value in self.options)
        return f"{sizes} {self.dtype} {self.quant}{options}"


@dataclass(frozen=True, slots=True)
class Traffic:
    """The fewest bytes that an operator must move: every input read once, every output written once."""

    read: int
    write: int

    @property
    def total(self) -> int:
        """Return bytes read and written."""
        return self.read + self.write


@dataclass(frozen=True)
class Variant:
    """One implementation of an operator.

    Attributes:
        name: `baseline`, `optimized`, a further design, or the name of a peer.
        run: (inputs, config) -> outputs by name; allocates its outputs, launches, returns without waiting.
        config: the config dataclass, None where there is nothing to tune. A knob `ctas` says how many programs each
            SM is to hold, 0 for any number; a search drops configs of which fewer fit.
        space: case -> values of every knob.
        valid: (case, config) -> None, or why the config cannot run: the one statement of that constraint.
        default: case -> the config used where the cache knows none.
        unsupported: case -> None, or why this variant cannot take the case.
        requires: packages that must import; a variant that requires any is a peer.
        promising: case -> configs of the space that every search tries, after the default.
        part: does some of the operator's work only, so that its time is not compared with the others'.
        compiles: compiles for seconds on its first call of a shape, so that a quick look measures it last.
    """

    name: str
    run: Callable[[Inputs, Config], Outputs]
    config: type[Any] | None = None
    space: Callable[[Case], Space] = lambda _case: {}
    valid: Callable[[Case, Config], str | None] = lambda _case, _config: None
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
        """Digest of the code that decides the results and the speed of a config, see `identity.code_digest`."""
        return code_digest(self.run)

    @property
    def role(self) -> Role:
        """Return what a record says of the variant: `own`, `peer` of another package, or `part` of the work only."""
        return "peer" if self.is_peer else "part" if self.part else "own"

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
            if self.valid(case, config) is None:
                yield config

    def config_from(self, values: Mapping[str, Any]) -> Config:
        """Make the config with these knob values.

        Raises:
            ValueError: an unknown, missing or wrongly typed knob.
        """
        if self.config is None:
            raise ValueError(f"variant {self.name} has no config, got {dict(values)}")
        try:
            return config_from(self.config, values)
        except ValueError as error:
            raise ValueError(f"config of {self.name}: {error}") from None

    def valid_config(self, case: Case, values: Mapping[str, Any]) -> Config | None:
        """Make the config with these knob values; None where they are not the variant's knobs, or not valid for the case."""
        return None if self.config is None else valid_config(self.config, self.valid, case, values)


def missing_packages(names: Iterable[str]) -> tuple[str, ...]:
    """Return the packages that are not installed."""
    return tuple(name for name in names if importlib.util.find_spec(name) is None)


def config_from(config: type[Any], values: Mapping[str, Any]) -> Config:
    """Make the config of a class with these knob values; a knob that is newer than the stored values takes its default.

    Raises:
        ValueError: an unknown, missing or wrongly typed knob.
    """
    types, needed = _knobs_of_class(cast(Hashable, config))
    if not needed <= set(values) <= set(types):
        raise ValueError(f"expected the knobs {sorted(types)}, got {sorted(values)}")
    for name, value in values.items():
        if type(value) is not types[name]:
            raise ValueError(f"{name}: {value!r}: expected {getattr(types[name], '__name__', types[name])}")
    return config(**values)


def valid_config(
    config: type[Any], valid: Callable[[Case, Config], str | None], case: Case, values: Mapping[str, Any]
) -> Config | None:
    """Make the config of a class with these knob values; None where they are not its knobs, or not valid for the case.

    For values that no space has, such as tiles of 0 rows, `valid` may raise ValueError or ArithmeticError. Any other exception is
    a mistake in `valid`, such as an axis that the case lacks, and is raised.
    """
    try:
        made = config_from(config, values)
        return made if valid(case, made) is None else None
    except (ValueError, ArithmeticError):
        return None


def knobs_of_class(config: type[Any]) -> tuple[dict[str, Any], set[str]]:
    """Return the type of every knob of a class, also where its module postpones annotations, and the knobs without a default.

    Raises:
        ValueError: a type that the module of the class does not have.
    """
    return _knobs_of_class(cast(Hashable, config))


@functools.cache
def _knobs_of_class(config: Any) -> tuple[dict[str, Any], set[str]]:
    try:
        knobs, types = dataclasses.fields(config), typing.get_type_hints(config)
    except NameError as error:
        raise ValueError(f"{config.__name__}: {error}") from error
    needed = {knob.name for knob in knobs if knob.default is dataclasses.MISSING}
    return {knob.name: types[knob.name] for knob in knobs}, needed


@dataclass(frozen=True)
class Op:
    """A contract that several variants implement.

    Attributes:
        name: as in sweeps and caches.
        axes: names of the sizes a case gives.
        dtypes: input element types, torch's names.
        quants: quantisation modes.
        options: option -> allowed values, the first is the default.
        free_axes: axes along which a cached config may serve another size.
        free_options: options of which it may serve another value, at the same sizes, where there is none for the case's own.
        unseen_options: options whose value a call without `config=` does not know, such as how tokens fall to groups; it looks up
            their first value. None for all free options.
        as_called: case -> the case that a call looks up, where more than unseen options tells them apart.
        bands: free axis -> the last size of each band but that of the largest; a config serves sizes of its own band only.
        flops: case -> floating-point operations of one call, for a roofline; None where memory is all that counts.
        inputs: (case, device=…, seed=…) -> inputs by name; on device `meta` without values.
        reference: (inputs) -> outputs by name, plain torch, fp32 inside.
        compare: (case, inputs, outputs, reference outputs) -> one line per disagreement.
        traffic: case -> the fewest bytes.
        variants: implementations and peers, baseline first.
        module: package or module that holds the operator's source.
        origin: arguments with which `operators` of the module makes the operator; None if the module holds it in `OP` or `OPS`.
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
    free_options: tuple[str, ...] = ()
    unseen_options: tuple[str, ...] | None = None
    as_called: Callable[[Case], Case] | None = None
    bands: Bands = field(default_factory=lambda: NO_BANDS)
    flops: Callable[[Case], int] | None = None
    origin: tuple[Any, ...] | None = None

    def variant(self, name: str) -> Variant:
        """Return the variant of that name.

        Raises:
            ValueError: there is none.
        """
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise unknown(f"{self.name}: variant", name, [variant.name for variant in self.variants])

    def called(self, case: Case) -> Case:
        """Return the case that a call without `config=` looks up: options that it does not know have their first value."""
        if self.as_called is not None:
            return self.as_called(case)
        unseen = self.free_options if self.unseen_options is None else self.unseen_options
        options = tuple((name, self.options[name][0] if name in unseen else value) for name, value in case.options)
        return dataclasses.replace(case, options=options)


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
