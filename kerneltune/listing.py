"""List operators without their code, and check their contracts when the code loads.

The package ships an index of its operators, so that a command that only lists operators does not import torch and triton. The
command `kerneltune ops --index` writes the index. A module that the index lacks is imported, so that a new operator needs no
registration. A mistake in a contract is an error when the operator loads, not a failure after a sweep.
"""

import ast
import dataclasses
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from kerneltune.errors import first_line, place_of
from kerneltune.files import replace_text
from kerneltune.spec import Case, Op, Option, Role, Space, Traffic, Variant, knobs_of_class
from kerneltune.wording import dtype_name

INDEX = Path(__file__).with_name("index.json")
OF_EVERY_CASE = ("name", "op", "dtype", "quant")
"""Fields that every case of a sweep has in addition to axes and options."""
_WARPS, _WARP_COUNTS = ("warps", "num_warps"), (1, 2, 4, 8, 16, 32)
_SIZES = (4096, 256, 16)
"""Sizes of three trial cases, each for all axes: a space must have a valid config for at least a single trial case."""


@dataclass(frozen=True)
class VariantSummary:
    """Hold the fields of a `Variant` that the index keeps."""

    name: str
    role: Role
    requires: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpSummary:
    """Hold the fields of an `Op` that the index keeps."""

    name: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    quants: tuple[str, ...]
    options: Mapping[str, tuple[Option, ...]]
    variants: tuple[VariantSummary, ...]


def summary_of(op: Op) -> OpSummary:
    """Return the fields of an operator that the index keeps."""
    variants = tuple(VariantSummary(variant.name, variant.role, variant.requires) for variant in op.variants)
    return OpSummary(op.name, op.axes, op.dtypes, op.quants, dict(op.options), variants)


def listed(
    modules: Iterable[str], operators_in: Callable[[str], Iterable[Op]], before_import: Callable[[], None]
) -> dict[str, OpSummary]:
    """Return the summaries of the operators of some modules, by operator name.

    Args:
        modules: names of the modules.
        operators_in: function that imports a module that the index lacks, and returns its operators.
        before_import: function that is called before each import.
    """
    index = _read(INDEX)
    ops: dict[str, OpSummary] = {}
    for module in modules:
        if module not in index:
            before_import()
        listed_ops = index[module] if module in index else map(summary_of, operators_in(module))
        ops |= {summary.name: summary for summary in listed_ops}
    return ops


def write_index(operators: Mapping[str, Iterable[Op]], path: Path = INDEX) -> None:
    """Write the index of operators, which are given by module: a line for each operator."""
    lines = [
        f"  {msgspec.json.encode(module).decode()}: [\n    "
        + ",\n    ".join(msgspec.json.encode(summary_of(op)).decode() for op in ops)
        + "\n  ]"
        for module, ops in sorted(operators.items())
    ]
    replace_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


@cache
def _read(path: Path) -> dict[str, tuple[OpSummary, ...]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[OpSummary, ...]])
    except (OSError, msgspec.MsgspecError):  # without a valid index, all modules are imported
        return {}


def check_contract(op: Op) -> None:
    """Raise ValueError with file, line, operator, variant, field and value if an operator contradicts itself."""
    for mistake in chain(_mistaken_types(op), _mistaken_forms(op), _missing_functions(op), _mistaken_names(op)):
        raise ValueError(f"{_place(op, mistake.partition(':')[0])}{op.name}: {mistake}")
    for variant in op.variants:
        if variant.config is not None:
            _check_variant(op, variant)


def same_name(op: Op, other: Op) -> ValueError:
    """Make the error of two operators with the same name, with the lines that give the name."""
    places = dict.fromkeys(place.removesuffix(": ") for each in (op, other) for place in _places(each, "name"))
    lines = f" ({', '.join(places)})" if places else ""
    return ValueError(f"two operators are called {op.name!r}: in {op.module} and in {other.module}{lines}: rename one of them")


def _place(op: Op, field: str) -> str:
    """Return the first of `_places`; empty if no call gives the name as a literal."""
    return next(_places(op, field), "")


def _places(op: Op, field: str) -> Iterator[str]:
    """Yield `FILE:LINE: ` of a field in each call of the operator's module that gives the operator's name, such as `Op(…)`.

    For a call without the field the line is the call's.
    """
    file = Path(getattr(sys.modules.get(op.module), "__file__", None) or "")
    with suppress(OSError, SyntaxError, ValueError):
        for call in (node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.Call)):
            fields = {word.arg: word.value for word in call.keywords}
            name = fields.get("name", next(iter(call.args), None))
            if isinstance(name, ast.Constant) and name.value == op.name:
                yield f"{file.name}:{fields.get(field, call).lineno}: "


def _mistaken_types(op: Op) -> Iterator[str]:
    """Yield `field: value: expected …` for variants, names or mappings of the wrong type."""
    if not isinstance(op.variants, tuple | list) or not all(isinstance(variant, Variant) for variant in op.variants):
        yield f"variants: {op.variants!r}: expected a tuple of Variant"
    lists = {name: getattr(op, name) for name in ("axes", "dtypes", "quants", "free_axes", "free_options")}
    lists |= {"unseen_options": op.unseen_options or (), **{f"variants: {v.name}: requires": v.requires for v in op.variants}}
    for field, names in lists.items():
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            yield f"{field}: {names!r}: expected a tuple of names"
    for field, by_name in (("options", op.options), ("bands", op.bands)):
        if not isinstance(by_name, Mapping) or not all(isinstance(values, tuple | list) for values in by_name.values()):
            yield f"{field}: {by_name!r}: expected names with tuples of values"


def _mistaken_forms(op: Op) -> Iterator[str]:
    """Yield `field: value: expected …` for a name, functions, types or options of the wrong form."""
    if not isinstance(op.name, str) or not re.fullmatch(r"[\w.-]*\w", op.name):  # it names files
        yield f"name: {op.name!r}: expected letters, digits, '_', '-' and '.'"
    for variant in op.variants:
        if not isinstance(variant.run, Hashable):
            yield f"variants: {variant.name}: run: {type(variant.run).__name__}: expected a hash, which a frozen dataclass has"
    for dtype in op.dtypes:
        if dtype != dtype_name(dtype):
            yield f"dtypes: {dtype!r}: expected {dtype_name(dtype)!r}"
    for name, values in op.options.items():
        if not values or not all(isinstance(value, Option) for value in values):
            yield f"options: {name}: {values!r}: expected a tuple of numbers or texts, the usual one first"


def _missing_functions(op: Op) -> Iterator[str]:
    """Yield `field: value: expected a function` for each field that must be a function and is not, such as `invalid=None`."""
    fields = {name: getattr(op, name) for name in ("inputs", "reference", "compare", "traffic")}
    fields |= {name: value for name in ("as_called", "flops") if (value := getattr(op, name)) is not None}
    of_variant = ("run", "space", "invalid", "unsupported", "promising")
    fields |= {f"variants: {variant.name}: {name}": getattr(variant, name) for variant in op.variants for name in of_variant}
    for name, value in fields.items():
        if not callable(value):
            yield f"{name}: {value!r}: expected a function"


def _mistaken_names(op: Op) -> Iterator[str]:
    """Yield `field: name: expected …` for each name that the operator lacks or has twice."""
    for field, mentioned, source, existing in (
        ("free_axes", op.free_axes, "axes", op.axes),
        ("free_options", op.free_options, "options", tuple(op.options)),
        ("unseen_options", op.unseen_options or (), "free_options", op.free_options),
        ("bands", tuple(op.bands), "free_axes", op.free_axes),
    ):
        for name in mentioned:
            if name not in existing:
                yield f"{field}: {name!r}: expected one of {source}: {', '.join(existing) or 'none'}"
    if type(op.max_distance) not in (int, float) or not op.max_distance >= 0:
        yield f"max_distance: {op.max_distance!r}: expected a log2 distance, 0 or more"
    for axis, ends in op.bands.items():
        if any(type(end) is not int for end in ends) or list(ends) != sorted(set(ends)):
            yield f"bands: {axis}: {ends}: expected rising sizes"
    for field, names in (
        ("variants", [variant.name for variant in op.variants]),
        ("axes and options", [*OF_EVERY_CASE, *op.axes, *op.options]),
    ):
        for name in names:
            if names.count(name) > 1:
                yield f"{field}: {name!r}: expected each name once"


def _check_variant(op: Op, variant: Variant) -> None:
    """Check the space and the default of a variant that has knobs."""
    where = f"{op.name} {variant.name}"
    assert variant.config is not None
    mistake = _mistake_in_config(variant.config)
    if mistake is not None:
        raise ValueError(f"{_place(op, 'variants')}{where}: config: {mistake}")
    if variant.default is None:
        raise ValueError(
            f"{_place(op, 'variants')}{where}: default: None: expected a function of the case, for {variant.config.__name__}"
        )
    reasons, options = [], tuple((name, values[0]) for name, values in op.options.items())
    for size in _SIZES:
        case = Case("contract", tuple((axis, size) for axis in op.axes), op.dtypes[0], op.quants[0], options)
        subject = f"{where} {case.label}"
        try:
            is_supported = _check_knobs(subject, variant, variant.default, variant.config, case)
            if not is_supported or _ask(subject, "space", next, variant.configs(case), None) is not None:
                return
            reasons.append(_error(subject, "space", variant.space, f"{dict(variant.space(case))}: no valid config"))
        except ValueError as error:
            if not isinstance(error.__cause__, ValueError | LookupError | ArithmeticError):  # sizes that do not fit together
                reasons.append(error)
    if reasons:
        raise reasons[0]


def _mistake_in_config(config: type[Any]) -> str | None:
    """Return the mistake of a config class, with the expected value; None for a right class."""
    if not dataclasses.is_dataclass(config):
        return f"{config!r}: expected a dataclass"
    kinds = knobs_of_class(config)
    if not kinds:
        return f"{config.__name__}: no knobs: expected a field, or None"
    for knob, kind in kinds.items():
        if kind not in (bool, int, float, str):  # no file of the cache holds other values
            return f"{knob}: {kind}: expected bool, int, float or str"
    return None


def check_case(op: Op, case: Case) -> None:
    """Check an operator's functions on a case of a sweep: the traffic, and the space and default of each variant with knobs.

    Space and default are checked on the case, and on the case as calls look it up. A mistake is `FILE:LINE: field: …`.
    """
    subject = f"{op.name} {case.label}"
    traffic = _ask(subject, "traffic", op.traffic, case)
    if not isinstance(traffic, Traffic):
        raise _error(subject, "traffic", op.traffic, f"{traffic!r}: expected a Traffic(read, write)")
    if traffic.total <= 0 and all(case.sizes.values()):
        raise _error(subject, "traffic", op.traffic, f"{traffic!r}: expected the bytes that are read and written")
    counts: list[tuple[str, Any, Any]] = [("traffic", op.traffic, count) for count in (traffic.read, traffic.write)]
    if op.flops is not None:
        counts.append(("flops", op.flops, _ask(subject, "flops", op.flops, case)))
    for field, function, count in counts:
        if count is not None and type(count) is not int:
            raise _error(subject, field, function, f"{count!r}: expected an integer of type int")
    for variant in op.variants:
        if variant.config is None or variant.default is None:
            _is_supported(f"{op.name} {variant.name} {case.label}", variant, case)
        else:
            called = _ask(subject, "as_called", op.as_called or op.case_of_call, case)
            if not isinstance(called, Case):
                raise _error(subject, "as_called", op.as_called or op.case_of_call, f"{called!r}: expected a Case")
            for looked_up in dict.fromkeys((case, called)):
                _check_knobs(f"{op.name} {variant.name} {looked_up.label}", variant, variant.default, variant.config, looked_up)


def _check_knobs(subject: str, variant: Variant, default: Callable[[Case], Any], config: Any, case: Case) -> bool:
    """Check the space and the default of a variant for a case, and return whether the variant supports the case."""
    if not _is_supported(subject, variant, case):
        return False
    wrong = _mistake_in_space(_ask(subject, "space", variant.space, case), knobs_of_class(config))
    if wrong is not None:
        raise _error(subject, "space", variant.space, wrong)
    chosen = _ask(subject, "default", default, case)
    if not isinstance(chosen, config):
        raise _error(subject, "default", default, f"{chosen!r}: expected a {config.__name__}")
    refused = _ask(subject, "invalid", variant.invalid, case, chosen)
    if refused is not None:
        raise _error(subject, "default", default, f"{chosen}: not valid ({refused})")
    return True


def _is_supported(subject: str, variant: Variant, case: Case) -> bool:
    reason = _ask(subject, "unsupported", variant.unsupported, case)
    if reason is not None and not (isinstance(reason, str) and reason):
        raise _error(subject, "unsupported", variant.unsupported, f"{reason!r}: expected None, or a reason in words")
    return reason is None


def _ask(subject: str, field: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:  # an operator's own code may fail in any way
        raise _error(subject, field, function, first_line(error), error) from error


def _error(subject: str, field: str, function: Callable[..., Any], text: str, error: Exception | None = None) -> ValueError:
    return ValueError(f"{place_of(function, error)}{field}: {text}, for {subject}")


def _mistake_in_space(space: Space, knobs: Mapping[str, type]) -> str | None:
    """Return the first wrong knob of a space, with the expected values; None if all knobs are right.

    knobs: types of the knobs of the config, by name.
    """
    if not isinstance(space, Mapping):
        return f"{space!r}: expected the values of each knob"
    for knob in (*space, *(knob for knob in knobs if knob not in space)):
        if knob not in knobs or knob not in space:
            expected = f"a knob of the config: {', '.join(knobs)}" if knob in space else "values in the space"
            return f"{knob!r}: expected {expected}"
        if knob in _WARPS and isinstance(space[knob], tuple | list | range):
            for count in space[knob]:
                if count not in _WARP_COUNTS:
                    return f"{knob!r}: {count!r}: expected powers of two up to {_WARP_COUNTS[-1]}"
        if not isinstance(space[knob], tuple | list | range):
            return f"{knob!r}: {space[knob]!r}: expected a tuple of values"
        for value in space[knob]:
            if type(value) is not knobs[knob]:  # no file of configs would keep the value
                return f"{knob!r}: {value!r} of type {type(value).__name__}: expected {knobs[knob].__name__}"
    return None
