"""Arguments of a launch as metadata: shapes, strides, types, alignment, which of them share memory.

Knows tensors by their methods, so that it imports no torch. Imports the standard library and encoding.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kerneltune.adopt.encoding import PLAIN, NotRecordableError, encode

ALIGNMENT = 16
"""Bytes: Triton compiles another kernel for a pointer that is not a multiple of it."""
_NO_ARGUMENT = ("grid", "warmup")
_KEYED = frozenset((int, bool, str, type(None)))
"""Types of values that tell launches apart by themselves."""


def launch_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells launches of one kernel apart in this process: scalars, element types and shapes.

    A float stands for its type, because scales and step sizes change with every launch. The hot path of serving.
    """
    try:
        key = [v if (k := type(v)) in _KEYED else float if k is float else (v.dtype, v.shape) for v in args]
    except AttributeError:
        key = [_keyed(value) for value in args]
    if len(kwargs) > len(_NO_ARGUMENT):
        for name, value in kwargs.items():
            if name not in _NO_ARGUMENT:
                key.append(name)
                key.append(_keyed(value))
    return tuple(key)


def _keyed(value: Any) -> Any:
    kind = type(value)
    if kind in _KEYED:
        return value
    if kind is float:
        return float
    try:
        return value.dtype, value.shape
    except AttributeError:
        return _other_key(value)


def layout_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return `launch_key` with the strides and alignment of every tensor, which a capture tells apart as well."""
    layouts = [
        (value.stride(), value.data_ptr() % ALIGNMENT == 0)
        for value in (*args, *kwargs.values())
        if hasattr(value, "data_ptr") and hasattr(value, "stride")
    ]
    return launch_key(args, kwargs), tuple(layouts)


def _other_key(value: Any) -> Any:
    if is_descriptor(value):
        return "descriptor", value.base.dtype, tuple(value.shape), tuple(value.strides), tuple(value.block_shape)
    if isinstance(value, tuple | list):
        return launch_key(value, {})
    try:
        return str(encode(value))
    except NotRecordableError:
        return id(value)


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor as Triton takes it."""
    return hasattr(value, "data_ptr") and hasattr(value, "dtype")


def is_descriptor(value: Any) -> bool:
    """Return whether a value is a tensor descriptor that the host made, as TMA loads take it."""
    return hasattr(value, "block_shape") and hasattr(value, "base")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's layout. Two tensors of one `storage` share memory; `offset` is the first element's, in bytes from its start."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: int
    offset: int
    element_bytes: int
    is_whole: bool

    @property
    def end(self) -> int:
        """Return bytes from the start of the storage to behind the last element."""
        if 0 in self.shape:
            return self.offset
        last = sum((size - 1) * abs(step) for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset + (last + 1) * self.element_bytes

    @property
    def is_aligned(self) -> bool:
        """Return whether Triton may take the pointer as aligned; storages are."""
        return self.offset % ALIGNMENT == 0


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a launch.

    Attributes:
        name: of the kernel's parameter.
        kind: `value`, `tensor` or `descriptor`.
        value: of a `value`, as JSON.
        tensor: of a tensor, or the one below a descriptor.
        block: a descriptor's shape, strides and block shape; empty for others.
        is_positional: whether the program gave it by position.
    """

    name: str
    kind: str
    value: Any = None
    tensor: Tensor | None = None
    block: tuple[tuple[int, ...], ...] = ()
    is_positional: bool = True

    @property
    def sizes(self) -> dict[str, int]:
        """Return what of an argument is a size: a whole number, or each side of a tensor as `name.0`, `name.1`, …."""
        if self.tensor is not None:
            return {f"{self.name}.{axis}": size for axis, size in enumerate(self.tensor.shape)}
        return {self.name: self.value} if type(self.value) is int else {}


@dataclass(slots=True)
class Storages:
    """The memory below the tensors of one launch, numbered; `live` keeps a tensor of each."""

    live: list[Any] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)

    def number(self, tensor: Any) -> int:
        """Return the number of a tensor's storage."""
        address = _storage_address(tensor)
        if address not in self._numbers:
            self._numbers[address] = len(self.live)
            self.live.append(tensor)
        return self._numbers[address]


def _storage_address(tensor: Any) -> int:
    return int(unwrapped(tensor).untyped_storage().data_ptr())


def unwrapped(tensor: Any) -> Any:
    """Return the torch tensor itself; triton.reinterpret wraps it to give it another element type."""
    base = getattr(tensor, "base", None)
    return base if type(tensor).__name__ == "TensorWrapper" and base is not None else tensor


def describe(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Argument], Storages]:
    """Return the metadata of a launch's arguments, and the storages of its tensors.

    Raises:
        NotRecordableError: names the argument that is neither a tensor nor a plain value.
    """
    storages = Storages()
    by_position = [_argument(name, value, storages, True) for name, value in zip(names, args, strict=False)]
    named = [_argument(name, value, storages, False) for name, value in kwargs.items() if name not in _NO_ARGUMENT]
    return [*by_position, *named], storages


def _argument(name: str, value: Any, storages: Storages, is_positional: bool) -> Argument:
    if is_descriptor(value):
        block = (tuple(value.shape), tuple(value.strides), tuple(value.block_shape))
        return Argument(name, "descriptor", None, _tensor(value.base, storages), block, is_positional)
    if is_tensor(value):
        return Argument(name, "tensor", None, _tensor(value, storages), (), is_positional)
    try:
        return Argument(name, "value", encode(value), None, (), is_positional)
    except NotRecordableError as error:
        raise NotRecordableError(f"argument {name}: {error}") from None


def _tensor(tensor: Any, storages: Storages) -> Tensor:
    inner = unwrapped(tensor)
    size = int(inner.element_size())
    offset = int(inner.storage_offset()) * size  # tensors without elements give no pointer
    shape, stride = tuple(int(n) for n in inner.shape), tuple(int(n) for n in inner.stride())
    name = str(tensor.dtype).removeprefix("torch.")
    whole = not (inner.is_floating_point() or inner.is_complex())
    return Tensor(name, shape, stride, storages.number(inner), offset, size, whole)


def signature(arguments: Sequence[Argument]) -> str:
    """Return a digest of what tells classes of launches apart; floats stand for their type, offsets for their alignment."""
    parts = []
    for argument in arguments:
        if argument.tensor is not None:
            tensor = argument.tensor
            layout = [tensor.dtype, tensor.shape, tensor.stride, tensor.storage, tensor.is_aligned]
            parts.append([argument.name, argument.kind, layout, argument.block])
        else:
            value = "float" if isinstance(argument.value, float) else argument.value
            parts.append([argument.name, argument.kind, value])
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def sizes_of(arguments: Sequence[Argument]) -> dict[str, int]:
    """Return every size of a launch by name."""
    found: dict[str, int] = {}
    for argument in arguments:
        found |= argument.sizes
    return found


def dtypes_of(arguments: Sequence[Argument]) -> list[str]:
    """Return the element types of the tensors, in the order of the arguments."""
    return [argument.tensor.dtype for argument in arguments if argument.tensor is not None]


def total_bytes(arguments: Sequence[Argument]) -> int:
    """Return the bytes of all tensor arguments, memory that several of them share counted once."""
    spans: dict[int, tuple[int, int]] = {}
    for argument in arguments:
        if (tensor := argument.tensor) is not None:
            elements = 1
            for size, step in zip(tensor.shape, tensor.stride, strict=True):
                elements *= size if step else min(size, 1)
            held, end = spans.get(tensor.storage, (0, 0))
            spans[tensor.storage] = held + elements * tensor.element_bytes, max(end, tensor.end)
    return sum(min(held, end) for held, end in spans.values())


def outline(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Return the sizes and element types of a launch, as `sizes_of` and `dtypes_of` do, without looking at its memory."""
    sizes: dict[str, int] = {}
    dtypes = []
    for name, value in (*zip(names, args, strict=False), *kwargs.items()):
        if name in _NO_ARGUMENT:
            continue
        tensor = value.base if is_descriptor(value) else value
        if is_tensor(tensor):
            sizes |= {f"{name}.{axis}": int(size) for axis, size in enumerate(tensor.shape)}
            dtypes.append(str(tensor.dtype).removeprefix("torch."))
        elif type(value) is int:
            sizes[name] = value
    return sizes, dtypes


def to_json(argument: Argument) -> dict[str, Any]:
    """Return an argument as JSON."""
    return asdict(argument)


def from_json(stored: Any) -> Argument:
    """Return the argument of its JSON.

    Raises:
        ValueError: one line naming the field.
    """
    if not isinstance(stored, dict) or not isinstance(stored.get("name"), str):
        raise ValueError(f"argument: {stored!r}: expected an argument with a name")
    name, kind = stored["name"], stored.get("kind")
    if kind not in ("value", "tensor", "descriptor"):
        raise ValueError(f"argument {name}: kind: {kind!r}: expected value, tensor or descriptor")
    if kind == "value":
        if not isinstance(stored.get("value"), (*PLAIN, dict)):
            raise ValueError(f"argument {name}: value: {stored.get('value')!r}: expected a plain value")
        return Argument(name, kind, stored.get("value"), is_positional=bool(stored.get("is_positional", True)))
    block = tuple(_sizes(name, "block", sizes) for sizes in stored.get("block", ()))
    return Argument(name, kind, None, _tensor_from(name, stored.get("tensor")), block, bool(stored.get("is_positional", True)))


def _tensor_from(name: str, stored: Any) -> Tensor:
    if not isinstance(stored, dict) or not isinstance(stored.get("dtype"), str):
        raise ValueError(f"argument {name}: tensor: {stored!r}: expected a tensor's layout")
    shape, stride = (_sizes(name, field, stored.get(field)) for field in ("shape", "stride"))
    whole = {field: stored.get(field) for field in ("storage", "offset", "element_bytes")}
    for field_name, value in whole.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"argument {name}: {field_name}: {value!r}: expected a whole number")
    if len(shape) != len(stride):
        raise ValueError(f"argument {name}: stride: {list(stride)}: expected {len(shape)} of them")
    return Tensor(stored["dtype"], shape, stride, is_whole=bool(stored.get("is_whole")), **whole)  # type: ignore[arg-type]


def _sizes(name: str, field_name: str, stored: Any) -> tuple[int, ...]:
    if not isinstance(stored, list | tuple) or not all(type(size) is int and size >= 0 for size in stored):
        raise ValueError(f"argument {name}: {field_name}: {stored!r}: expected whole numbers")
    return tuple(stored)
