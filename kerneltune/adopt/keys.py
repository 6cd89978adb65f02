"""Keys of launches: tuples that tell launches of a kernel apart in this process, made in a microsecond."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from kerneltune.adopt.arguments import (
    ALIGNMENT,
    PLAIN,
    NotRecordableError,
    encode,
    holds_tensor,
    is_descriptor,
    is_tensor,
)

NO_ARGUMENT = ("grid", "warmup")
"""Names that a launch is given beside the arguments of its kernel."""
_KEYED = frozenset((int, bool, str, type(None)))
"""Types of values that tell launches apart by themselves."""


def launch_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells launches of one kernel apart in this process: scalars, element types and shapes.

    A float stands for its type, because scales and step sizes change with every launch.
    """
    try:
        key = [v if (k := type(v)) in _KEYED else float if k is float else (v.dtype, v.shape) for v in args]
    except AttributeError:
        key = [_keyed(value) for value in args]
    if len(kwargs) > len(NO_ARGUMENT):
        for name, value in kwargs.items():
            if name not in NO_ARGUMENT:
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


V = TypeVar("V")


@dataclass(slots=True)
class KeyPlan(Generic[V]):
    """Keys of the launches whose arguments have the same names and types, and a value for each key.

    Attributes:
        parts: expressions of the key's items; equal for launches whose keys are made in the same way.
        key: function that returns the key of a launch from its values. The hot path of serving.
        places: of all arguments by name.
        found: the value of each key.
    """

    parts: tuple[str, ...]
    key: Callable[[Sequence[Any]], tuple[Any, ...]]
    places: dict[str, int]
    found: dict[tuple[Any, ...], V] = field(default_factory=dict)

    def size(self, values: Sequence[Any], name: str) -> int | None:
        """Return a size of a launch by its name, `N` or `x.0`; None if the launch has no size of this name."""
        argument, _, axis = name.partition(".")
        place = self.places.get(argument)
        if place is None:
            return None
        value = values[place]
        if not axis:
            return value if type(value) is int else None
        shape = getattr(value.base if is_descriptor(value) else value, "shape", ())
        return int(shape[int(axis)]) if int(axis) < len(shape) else None


def plan_key(
    names: Sequence[str], values: Sequence[Any], deciding: Collection[str], is_whole: bool = False, is_typed: bool = False
) -> KeyPlan[Any]:
    """Return how keys are made of launches with arguments of these names and types.

    Element types are part of every key. The function of the keys is compiled from an expression with an item for each part,
    because a loop over the arguments takes 2.5 times as long.

    Args:
        names, values: names and values of the arguments of one launch, and of its grid.
        deciding: names of the arguments whose values or shapes are part of the key; `grid` for the code of its function.
        is_whole: whether all values and shapes are part of it, but for floats: scales and step sizes change with every launch.
        is_typed: whether the types of the other arguments are part of it.
    """
    parts: list[str] = []
    for place, (name, value) in enumerate(zip(names, values, strict=True)):
        if name in NO_ARGUMENT:
            parts += [f"code_of(v[{place}])"] if name in deciding else []
            continue
        is_deciding = name in deciding or (is_whole and type(value) is not float)
        if is_descriptor(value):
            parts.append(f"other(v[{place}])" if is_deciding else f"v[{place}].base.dtype")
        elif is_tensor(value):
            parts += [f"v[{place}].dtype", *([f"v[{place}].shape"] if is_deciding else ())]
        elif is_deciding and type(value) in PLAIN:
            parts.append(f"v[{place}]")
        elif is_deciding or holds_tensor(value):
            parts.append(f"other(v[{place}])")
        elif is_typed:
            parts.append(f"type(v[{place}])")
    key = eval(f"lambda v: ({''.join(f'{part}, ' for part in parts)})", {"other": _other_key, "code_of": _code_of})
    return KeyPlan(tuple(parts), key, {name: place for place, name in enumerate(names)})


def _code_of(grid: Any) -> Any:
    """Return the code of a grid that is a function; None for a grid of numbers."""
    return getattr(grid, "__code__", None)


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
