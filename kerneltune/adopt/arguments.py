"""Describe the arguments of a launch as JSON: values, and shapes, strides, types, alignment and memory of tensors.

Nothing is executed on load.
"""

import hashlib
import importlib
import inspect
import json
import math
from collections import namedtuple
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, TypeGuard

import msgspec

from kerneltune.adopt.program import attribute, main_name, values_of_module
from kerneltune.identity import code_digest

SCALAR_TYPES = (bool, int, float, str, type(None))
_NOT_FINITE = ("inf", "-inf", "nan")


class NotRecordableError(ValueError):
    """Report a value that JSON cannot hold as data."""


def encode_value(value: Any) -> Any:
    """Return a value as JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if type(value) in SCALAR_TYPES:
        return value
    for plain in (int, float, str):  # members of enumerations, numpy's floats
        if isinstance(value, plain):
            return str.__str__(value) if plain is str else plain(value)
    if isinstance(value, tuple | list):
        items = [encode_value(item) for item in value]
        return {"fields": dict(zip(value._fields, items, strict=True))} if _is_named(value) else {"tuple": items}
    kind = type(value)
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return {"torch": str(value).removeprefix("torch.")}
    if kind.__module__.startswith("triton.language") and kind.__name__ == "dtype":
        return {"triton": str(value)}
    if kind.__module__.startswith("triton.language") and kind.__name__ == "constexpr":
        return encode_value(value.value)
    return _encode_named(value)


def _encode_named(value: Any) -> dict[str, list[Any]]:
    """Return a function under `triton.jit`, or an object of a frozen dataclass, as JSON."""
    kind = type(value)
    if is_function(value):
        return {"function": _encode_function(value.fn)}
    if _is_frozen(kind) and attribute(values_of_module(kind.__module__), kind.__qualname__) is kind:
        content = {field.name: _encode_field(getattr(value, field.name)) for field in fields(value) if field.init}
        return {"object": [main_name(kind.__module__), kind.__qualname__, content]}
    raise NotRecordableError(f"a value of type {kind.__module__}.{kind.__qualname__}")


def _is_frozen(kind: Any) -> bool:
    """Return whether a type is a frozen dataclass, as the layouts of Gluon are."""
    return isinstance(kind, type) and is_dataclass(kind) and bool(vars(kind)["__dataclass_params__"].frozen)


def _encode_field(value: Any) -> Any:
    """Return a field as JSON; unlike the kernel, its class tells lists from tuples."""
    return [_encode_field(item) for item in value] if isinstance(value, list) else encode_value(value)


def identity_of(value: Any) -> str | int:
    """Return a key that tells a value from other values: its JSON, or its identity if JSON cannot hold it."""
    try:
        return repr(encode_value(value))
    except NotRecordableError:
        return id(value)


def is_function(value: Any) -> bool:
    """Return whether a value is a function under `triton.jit`, which a kernel may call."""
    return type(value).__module__.startswith("triton.") and inspect.isfunction(getattr(value, "fn", None))


def _encode_function(function: Any) -> list[str]:
    """Return the module of a function under `triton.jit`, its name there, and its `source_digest`."""
    module, name = function.__module__, function.__qualname__
    if getattr(attribute(function.__globals__, name), "fn", None) is not function:
        raise NotRecordableError(f"a function that {main_name(module)} does not hold by its name, {name}")
    return [main_name(module), name, source_digest(function)]


def _names(value: Any, kind: str) -> bool:
    """Return whether a value is the JSON of a function or of an object: its module, its name or class, and one item more."""
    content = value.get(kind) if isinstance(value, dict) else None
    return isinstance(content, list) and len(content) == 3 and all(isinstance(part, str) for part in content[:2])


def _decode_function(stored: Sequence[str], load: Callable[[str, str], Any]) -> Any:
    module, name, digest = stored
    function = attribute(vars(load(module, name)), name)
    if not is_function(function):
        raise ValueError(f"{module}.{name}: the module holds no function of this name under triton.jit: capture again")
    if source_digest(function.fn) != digest:
        raise ValueError(f"{module}.{name}: its source has changed since it was captured: capture again")
    return function


@cache
def source_digest(function: Any) -> str:
    """Return the digest of a function's code and of its helpers, without names, comments and lines; empty without source."""
    try:
        return code_digest(function)
    except ValueError:
        return ""


def decode_value(value: Any, load: Callable[[str, str], Any] = lambda module, _: importlib.import_module(module)) -> Any:
    """Return the value from the JSON of `encode_value`.

    load: function that returns the module of a function's module name and name.

    Raises:
        ValueError: the JSON is none that `encode_value` writes, or the source of a function has changed.
    """
    if isinstance(value, SCALAR_TYPES):
        return value
    if isinstance(value, dict) and len(value) == 1:
        (kind, content), *_ = value.items()
        if kind == "tuple" and isinstance(content, list):
            return tuple(decode_value(item, load) for item in content)
        if kind == "fields" and isinstance(content, dict):
            return namedtuple("Fields", content)(*(decode_value(item, load) for item in content.values()))
        if _names(value, kind) and (decode := {"function": _decode_function, "object": _decode_object}.get(kind)):
            return decode(content, load)
        if kind == "float" and content in _NOT_FINITE:
            return float(content)
        if kind == "torch" and isinstance(content, str):
            return torch_dtype(content)
        if kind == "triton" and isinstance(content, str):
            language: Any = importlib.import_module("triton.language")
            try:
                return language.dtype(content)
            except Exception as error:  # an assertion, in the versions seen
                raise ValueError(f"dtype: {content!r}: expected the name of an element type of triton") from error
    raise ValueError(
        f"{value!r}: expected a plain value, an element type, a function, a tuple or an object of a frozen dataclass"
    )


def _decode_object(stored: Sequence[Any], load: Callable[[str, str], Any]) -> Any:
    """Return an object of a frozen dataclass from its module, its class's name and its fields."""
    module, name, content = stored

    def field(value: Any) -> Any:
        return [field(item) for item in value] if isinstance(value, list) else decode_value(value, load)

    try:
        kind = attribute(vars(load(module, name)), name)
        if not _is_frozen(kind):
            raise TypeError("no frozen dataclass")
        return kind(**{field_name: field(value) for field_name, value in content.items()})
    except (TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"{module}.{name}: {error}: capture again") from error


def torch_dtype(name: str) -> Any:
    """Return torch's element type of a name."""
    torch: Any = importlib.import_module("torch")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype: {name!r}: expected the name of an element type of torch")
    return dtype


ALIGNMENT = 16
"""Bytes: Triton compiles another kernel for a pointer that is not a multiple of it."""
_OF_REINTERPRET = {
    "int1": "bool", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2", "fp8e4b8": "float8_e4m3fnuz", "fp8e5b16": "float8_e5m2fnuz",
}  # fmt: skip
"""Triton's name of an element type, as tensors of `triton.reinterpret` have it -> torch's name."""


@cache
def element_type(dtype: Any) -> str:
    """Return torch's name of an element type, without its module."""
    name = str(dtype).removeprefix("torch.")
    return _OF_REINTERPRET.get(name, name)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor that a Triton kernel accepts."""
    return hasattr(value, "data_ptr") and hasattr(value, "dtype")


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer but no boolean, so that it may be a size."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_descriptor(value: Any) -> bool:
    """Return whether a value is a tensor descriptor made on the host, for TMA loads."""
    return hasattr(value, "block_shape") and hasattr(value, "base")


class TensorLayout(msgspec.Struct, frozen=True, rename={"holds_integers": "is_whole"}):
    """Describe a tensor's layout. Tensors with the same `storage` share memory; `offset` is in bytes from the storage's start."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: int
    offset: int
    element_bytes: int
    holds_integers: bool

    def __post_init__(self) -> None:
        """Raise ValueError for a layout that no tensor has."""
        if len(self.shape) != len(self.stride):
            raise ValueError(f"stride: {list(self.stride)}: expected {len(self.shape)} of them")
        if min(*self.shape, *self.stride, self.storage, self.offset, self.element_bytes) < 0:
            raise ValueError("expected integers of 0 or more")

    @property
    def end(self) -> int:
        """Return the bytes from the start of the storage to the end of the last element."""
        if 0 in self.shape:
            return self.offset
        last = sum((size - 1) * abs(step) for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset + (last + 1) * self.element_bytes

    @property
    def held_bytes(self) -> int:
        """Return the bytes of the elements; elements that a stride of 0 repeats count once."""
        elements = math.prod(size if step else min(size, 1) for size, step in zip(self.shape, self.stride, strict=True))
        return elements * self.element_bytes

    @property
    def is_aligned(self) -> bool:
        """Return whether Triton may take the pointer for aligned; the start of a storage is aligned."""
        return self.offset % ALIGNMENT == 0


class Statistics(msgspec.Struct, frozen=True):
    """Hold mean, standard deviation, least and largest of the finite values of a storage."""

    mean: float = 0.0
    std: float = 1.0
    least: float = -1.0
    largest: float = 1.0


Kept = Literal["values", "sample", "statistics", "missing"]


class KeptValues(msgspec.Struct, frozen=True, omit_defaults=True):
    """Describe what a capture keeps of a storage.

    Attributes:
        kept: `values`: all of its bytes, as of indices; `sample`: its first bytes; `statistics`: no bytes; `missing`: no bytes,
            though a launch needs them.
        bytes: from its first argument's start to its last argument's end.
        statistics: None unless it holds data.
        behind: bytes of the program's buffer behind the arguments.
    """

    kept: Kept
    bytes: int = 0
    statistics: Statistics | None = None
    behind: int = 0

    @property
    def are_data(self) -> bool:
        """Return whether a replay gives values of its own: the values are data, such as floating-point values, or missing."""
        return self.kept != "values"


@dataclass(frozen=True, slots=True)
class Argument:
    """Describe an argument of a launch.

    Attributes:
        name: name of the kernel's parameter.
        kind: `value`, `tensor` or `descriptor`.
        value: the value as JSON; None for a tensor or a descriptor.
        tensor: layout of the tensor, or of the tensor below a descriptor.
        block: a descriptor's shape, strides and block shape; empty for a tensor or a value.
        is_positional: whether the program gave the argument by position.
    """

    name: str
    kind: Literal["value", "tensor", "descriptor"]
    value: Any = None
    tensor: TensorLayout | None = None
    block: tuple[tuple[int, ...], ...] = ()
    is_positional: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError for an argument that is neither a plain value nor has a tensor's layout."""
        if (self.tensor is None) != (self.kind == "value") or not isinstance(self.value, (*SCALAR_TYPES, dict)):
            raise ValueError(f"argument {self.name}: expected a plain value, or the layout of a {self.kind}")

    @property
    def named(self) -> str:
        """Return the name of a function under `triton.jit`, or of an object's class; empty for any other argument."""
        return next((str(self.value[kind][1]) for kind in ("function", "object") if _names(self.value, kind)), "")

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes of an argument by name: an integer, or each side of a tensor as `name.0`, `name.1`, …."""
        if self.tensor is not None:
            return {f"{self.name}.{axis}": size for axis, size in enumerate(self.tensor.shape)}
        return {self.name: self.value} if type(self.value) is int else {}


def describe(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Argument], list[Any]]:
    """Return the metadata of a launch's arguments, and for each storage a live tensor in it.

    Distant views of a buffer have storages of their own, see `_split_storages`.

    names: names of the kernel's parameters.
    """
    live: dict[int, Any] = {}
    named = [(name, value, True) for name, value in zip(names, args, strict=False)]
    named += [(name, value, False) for name, value in kwargs.items()]
    arguments = [_argument(*part, live, is_positional) for name, value, is_positional in named for part in parts(name, value)]
    return _split_storages(arguments, list(live.values()))


def _is_named(value: Any) -> TypeGuard[Any]:
    """Return whether a tuple has names of its items, which a kernel may read."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of an argument; of a tuple with tensors each item, as `x[0]`, `x[1]`, or by the names of its items."""
    if isinstance(value, tuple | list) and any(map(holds_tensor, value)):
        for place, item in zip(value._fields if _is_named(value) else range(len(value)), value, strict=True):
            yield from parts(f"{name}[{place}]", item)
    else:
        yield name, value


def holds_tensor(value: Any) -> bool:
    """Return whether a value is a tensor or a descriptor, or a tuple that holds a tensor or a descriptor."""
    return any(map(holds_tensor, value)) if isinstance(value, tuple | list) else is_tensor(value) or is_descriptor(value)


def with_tuples(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name; items of `parts`, such as `x[0]` and `x[1]`, are joined to tuples again."""
    joined: dict[str, Any] = {}
    for name, value in named.items():
        place, *inner = name.replace("]", "").split("[")
        items = joined
        for next_place in inner:
            items, place = items.setdefault(place, {}), next_place
        items[place] = value
    return {name: _joined(value) for name, value in joined.items()}


def _joined(value: Any) -> Any:
    """Return the tuple of a dict of items by place or by name, the value itself if it is no dict."""
    if not isinstance(value, dict):
        return value
    items = {name: _joined(item) for name, item in value.items()}
    return tuple(items.values()) if all(map(str.isdecimal, items)) else namedtuple("Fields", items)(**items)


_MOST_SPREAD = 2
"""Views share a storage if they span at most so many times the bytes that they cover."""


def _split_storages(arguments: Sequence[Argument], buffers: Sequence[Any]) -> tuple[list[Argument], list[Any]]:
    """Give distant views of the same buffer different storages, and number all storages anew.

    Because a replay makes all memory between the views of a storage, two small views of a buffer of 3 GiB took 9.8 GB.
    """
    numbers: dict[TensorLayout, int] = {}
    storages: dict[tuple[int, int], Any] = {}
    for number, live in enumerate(buffers):
        begin = end = covered = 0  # of the present storage: its span, and the bytes that its views cover
        for view in sorted(set(views(arguments, number)), key=lambda view: (view.offset, view.end)):
            new_bytes = max(view.end - max(view.offset, end), 0)
            is_near = view.offset < end or max(view.end, end) - begin <= _MOST_SPREAD * (covered + new_bytes)
            if not covered or not is_near:
                begin, end, covered, new_bytes = view.offset, view.offset, 0, view.end - view.offset
                storages[number, view.offset] = live
            end, covered = max(end, view.end), covered + new_bytes
            numbers[view] = len(storages) - 1
    moved = {layout: msgspec.structs.replace(layout, storage=number) for layout, number in numbers.items()}
    return [a if a.tensor is None else replace(a, tensor=moved[a.tensor]) for a in arguments], list(storages.values())


def _argument(name: str, value: Any, live: dict[int, Any], is_positional: bool) -> Argument:
    if is_descriptor(value):
        block = (tuple(value.shape), tuple(value.strides), tuple(value.block_shape))
        return Argument(name, "descriptor", tensor=_tensor(value.base, live), block=block, is_positional=is_positional)
    if is_tensor(value):
        return Argument(name, "tensor", tensor=_tensor(value, live), is_positional=is_positional)
    try:
        return Argument(name, "value", encode_value(value), is_positional=is_positional)
    except NotRecordableError as error:
        raise NotRecordableError(f"argument {name}: {error}") from None


def _tensor(tensor: Any, live: dict[int, Any]) -> TensorLayout:
    inner = tensor.base if type(tensor).__name__ == "TensorWrapper" else tensor  # triton.reinterpret wraps tensors
    live.setdefault(address := int(inner.untyped_storage().data_ptr()), inner)
    size, name = int(inner.element_size()), element_type(tensor.dtype)
    if inner is not tensor and torch_dtype(name).itemsize != size:
        raise NotRecordableError(f"a tensor of {inner.dtype} that the program reinterprets as {tensor.dtype}")
    offset = int(inner.storage_offset()) * size  # tensors without elements give no pointer
    shape, stride = tuple(int(n) for n in inner.shape), tuple(int(n) for n in inner.stride())
    holds_integers = not (inner.is_floating_point() or inner.is_complex())
    return TensorLayout(name, shape, stride, list(live).index(address), offset, size, holds_integers)


def sign_of(value: float) -> int:
    """Return 1, 0 or -1: a kernel may compare a float with 0, as a flag or a value that turns a part off."""
    return (value > 0) - (value < 0)


def signature(arguments: Sequence[Argument], ignored: Collection[str] = (), has_signs: bool = False) -> str:
    """Return a digest of layouts, alignment, types of floats and values of all other arguments: equal for launches of a class.

    Args:
        arguments: arguments of a launch.
        ignored: names of other arguments whose types, but not values, are in the digest.
        has_signs: whether the signs of floats are in the digest.
    """
    facts: list[Any] = []
    for argument in arguments:
        if (tensor := argument.tensor) is not None:
            layout = [tensor.dtype, tensor.shape, tensor.stride, tensor.storage, tensor.is_aligned]
            facts.append([argument.name, argument.kind, layout, argument.block])
        else:
            is_special = isinstance(argument.value, dict) and "float" in argument.value  # infinity or NaN
            value = decode_value(argument.value) if is_special else argument.value
            is_type = isinstance(value, float) or argument.name in ignored
            facts.append([argument.name, argument.kind, type(value).__name__ if is_type else value])
            if has_signs and isinstance(value, float) and argument.name not in ignored and sign_of(value) < 1:
                facts.append(sign_of(value))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def views(arguments: Sequence[Argument], storage: int) -> list[TensorLayout]:
    """Return the tensors among arguments that lie in a storage."""
    return [a.tensor for a in arguments if a.tensor is not None and a.tensor.storage == storage]


def span(tensors: Sequence[TensorLayout]) -> tuple[int, int]:
    """Return the begin and the end of the bytes of a storage that its tensors cover."""
    return min(tensor.offset for tensor in tensors), max(tensor.end for tensor in tensors)
