"""Make Triton's interpreter faster: fewer tensors and types for an operation, with the same values, types and errors.

An operation that needs a cast other than of int32 to int64, and an operation that overflows, go the interpreter's own way.
`fp8_tensorwise --check-only`, default configs, 2026-11-26: 11.7 -> 9.9 processor seconds; a small `fp8_tensorwise_2d`,
2026-11-30: 31 -> 19 ms.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

_CHECKED = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
"""Operations whose overflow the interpreter checks."""
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_SHIFTS = {"lshift": np.left_shift, "rshift": np.right_shift}
_COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
OPERATORS: dict[str, Any] = _CHECKED | _BITWISE | _SHIFTS | _COMPARISONS
"""Operators of tensors that numpy computes where no operand needs a cast."""

_FLOATS = frozenset({"fp16", "fp32", "fp64"})
_OF_FEW_BITS = frozenset({"int8", "int16", "uint8", "uint16"})
"""Integers that are cast to int32 for a comparison with one of Python's."""
_NARROW = _OF_FEW_BITS | {"int32", "uint32"}
_INTEGERS = _NARROW | {"int64", "uint64"}
_LARGEST = 2**31 - 1
_NUMBERS: dict[str, tuple[Any, float, float]] = {
    "int1": (bool, 0, 1), "int64": (int, -_LARGEST, _LARGEST), "uint64": (int, 0, _LARGEST), "fp32": ((int, float), -3e38, 3e38),
    **{kind: (int, np.iinfo(kind).min, np.iinfo(kind).max) for kind in _NARROW},
}  # fmt: skip
"""Element types, and Python's numbers that take the element type of the other operand: their types and bounds."""
_OFFSETS = ("int32", "int64")
"""Element types of offsets that a pointer takes without a cast."""
_FEWEST_IN_NUMPY = 512
"""Least number of elements of an access by numpy. Of 16,384 elements Triton's native module takes 25 ns to load an element and
40 ns to store it, numpy takes 3 ns; of 64 elements numpy takes four times as long (timed by a script, 2026-11-28)."""
_UNWRAP = "_unwrap_if_constexpr"
"""Function of the language that looks for constants among arguments. It is private; without it, nothing is replaced."""


def quicken() -> None:
    """Replace the parts of the interpreter that take most of its time; an unknown part stays."""
    from triton.runtime import interpreter

    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    core.block_type.__init__ = _block_types_of_known_shapes(core.block_type.__init__)
    core.tensor.__init__ = _tensors_of_known_shapes(core.tensor.__init__)
    if unwrap := getattr(core, _UNWRAP, None):
        plain = {core.tensor, core.dtype, bool, int, float, str, type(None)}
        setattr(core, _UNWRAP, lambda value: value if type(value) in plain else unwrap(value))
    semantic.broadcast_impl_value = _operands_of_one_shape(semantic.broadcast_impl_value)
    semantic.binary_op_sanitize_overflow_impl = _assert_no_overflow
    semantic.binary_op_type_checking_impl = _operands_of_one_type(semantic.binary_op_type_checking_impl)


def remembered_dtypes(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Remember numpy's type of each element type: the interpreter makes a dict of all types at every call."""
    dtypes: dict[str, Any] = {}

    def remembered(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = np_dtype(kind)
        return dtypes[name]

    return remembered


def with_quick_accesses(native: Any) -> Any:
    """Return the native module with a load and a store by numpy, for many elements at distances of whole elements."""

    def load(addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        memory, places, chosen = _memory(addresses, mask, dtype)
        if memory is None:
            return native.load(addresses, mask, other, dtype)
        if chosen is ...:
            return memory[places]
        values = np.array(other, dtype)
        values[chosen] = memory[places]
        return values

    def store(addresses: Any, values: Any, mask: Any) -> None:
        memory, places, chosen = _memory(addresses, mask, values.dtype)
        if memory is None or values.shape != addresses.shape:
            native.store(addresses, values, mask)
        else:
            memory[places] = values[chosen]  # of equal places the last element stays, as in the native module

    return SimpleNamespace(**{**vars(native), "load": load, "store": store})


def _memory(addresses: Any, mask: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """Return the memory of an access as an array, the places of its elements, and the elements; None for the native module."""
    if addresses.size < _FEWEST_IN_NUMPY or np.shape(mask) != addresses.shape:
        return None, None, None
    chosen = ... if np.all(mask) else np.asarray(mask)
    accessed = addresses[chosen]
    first, size = accessed.min(initial=2**64 - 1), np.dtype(dtype).itemsize
    offsets = (accessed - first).astype(np.int64)
    if not offsets.size or (size > 1 and (offsets & (size - 1)).any()):
        return None, None, None
    places = offsets // size
    interface = {"data": (int(first), False), "shape": (int(places.max()) + 1,), "typestr": np.dtype(dtype).str, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=interface)), places, chosen


def _block_types_of_known_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """Remember the parts of a block type that follow from its shape: each operation makes several block types."""
    parts_of: dict[tuple[int, ...], tuple[str, dict[str, Any]]] = {}

    def initialize(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if sizes not in parts_of:
            make(self, element_ty, shape)
            parts = {name: value for name, value in vars(self).items() if name not in ("element_ty", "name")}
            parts_of[sizes] = self.name.removesuffix(f"{element_ty}>"), parts
        name, parts = parts_of[sizes]
        vars(self).update(parts, element_ty=element_ty, name=f"{name}{element_ty}>")

    return initialize


def _tensors_of_known_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """Remember the parts of a tensor that follow from its shape, beside the shape of its type."""
    scalar: dict[str, Any] = {}

    def initialize(self: Any, handle: Any, type: Any) -> None:
        shape = vars(type.shape) if type.is_block() else scalar
        if "tensor_parts" not in shape:
            make(self, handle, type)
            parts = {name: value for name, value in vars(self).items() if name not in ("handle", "type", "dtype")}
            shape["tensor_parts"] = parts
        vars(self).update(shape["tensor_parts"], handle=handle, type=type, dtype=type.scalar)

    return initialize


def _operands_of_one_shape(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Return operands of equal shape as they are, and repeat a scalar without further types."""
    from triton.runtime.interpreter import TensorHandle, tl

    def repeated(scalar: Any, like: Any) -> Any:
        data = scalar.handle.data
        handle = TensorHandle(np.broadcast_to(data, tuple(like.type.shape)), scalar.dtype)
        return tl.core.tensor(handle, like.type.with_element_ty(scalar.dtype))

    def broadcasted(left: Any, right: Any) -> Any:
        if left.shape is right.shape:
            return left, right
        if not left.shape:
            return repeated(left, right), right
        if not right.shape:
            return left, repeated(right, left)
        return broadcast(left, right)

    return broadcasted


def _operands_of_one_type(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return operands of one shape and one type, whose operations need no cast, as they are."""
    from triton.runtime.interpreter import tl

    uncast = _INTEGERS | {"int1", "fp32", "fp64"}

    def checked(left: Any, right: Any, *args: Any, **named: Any) -> Any:
        are_tensors = type(left) is type(right) is tl.core.tensor
        if are_tensors and left.dtype is right.dtype and left.shape is right.shape and left.dtype.name in uncast:
            return left, right
        return check(left, right, *args, **named)

    return checked


def _operand(left: Any, right: Any) -> tuple[Any, Any]:
    """Return the values of the right operand, and the operand whose shape the result has; None if an operand needs a cast."""
    if type(right) is not type(left):
        types, least, most = _NUMBERS.get(left.dtype.name, ((), 0, 0))
        is_of_kind = isinstance(right, types) and (least <= right <= most or abs(right) == math.inf)
        is_quick = is_of_kind and (right or math.copysign(1, right) > 0)  # before Triton 3.9, -0.0 is 0 in the interpreter
        return (left.handle.data.dtype.type(right), left) if is_quick else (None, None)
    kinds = left.dtype.name, right.dtype.name
    if right.dtype is left.dtype or kinds == ("int64", "int32") or (right.dtype.name in _OFFSETS and left.dtype.is_ptr()):
        data, is_of_rank = right.handle.data, len(left.shape) == len(right.shape)
        data = data.astype(np.int64) if kinds == ("int64", "int32") else data
        if left.shape is right.shape or not right.shape or (data.size == 1 and is_of_rank):
            return data, left
        is_like_right = not left.shape or (left.handle.data.size == 1 and is_of_rank)
        return data, right if is_like_right and right.dtype is left.dtype else _repeated(left, right)
    return None, None


def _repeated(left: Any, right: Any) -> Any:
    """Return a tensor of the left operand's type in the shape that both operands have when repeated; None if they do not fit."""
    from triton.runtime.interpreter import tl

    key = left.dtype.name, id(left.shape), id(right.shape)  # `_block_types_of_known_shapes` keeps the shapes
    if key not in _REPEATED:
        try:
            sizes = np.broadcast_shapes(left.type.get_block_shapes() if left.shape else (), right.type.get_block_shapes())
            _REPEATED[key] = tl.core.tensor(None, tl.block_type(left.dtype, list(sizes)))
        except ValueError:
            _REPEATED[key] = None
    return _REPEATED[key]


_REPEATED: dict[tuple[str, int, int], Any] = {}
"""Results of `_repeated`."""


def quick_operator(name: str, is_reflected: bool, operator: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return an operator of tensors that numpy computes if no operand needs a cast; the interpreter makes up to six tensors."""
    from triton.runtime.interpreter import TensorHandle, interpreter_builder, tl

    compute, is_comparison, tensor = OPERATORS[name], name in _COMPARISONS, tl.core.tensor
    kinds = _INTEGERS | ({"int1"} if name in _BITWISE else frozenset() if name in _SHIFTS else _FLOATS)
    kinds_of_numbers = kinds - _OF_FEW_BITS if is_comparison else kinds
    checked = _NARROW if name in _CHECKED else frozenset()

    def computed(left: Any, right: Any) -> Any:
        kind, handle = left.dtype, left.handle
        data, like = _operand(left, right)
        if like is None and kind is tl.int32 and getattr(right, "dtype", None) is tl.int64:
            wide = left.type.with_element_ty(tl.int64) if left.shape else tl.int64
            return computed(tensor(TensorHandle(handle.data.astype(np.int64), tl.int64), wide), right)
        possible = kinds if type(right) is tensor else kinds_of_numbers
        if like is None or kind.name not in possible or data.dtype is not handle.data.dtype:
            return operator(left, right)
        operands = (data, handle.data) if is_reflected else (handle.data, data)
        if kind.name in checked and interpreter_builder.options.debug:
            exact = compute(*operands, dtype=np.int64)
            if not fits(exact, kind):
                return operator(left, right)
            values = exact.astype(data.dtype)
        else:
            values = compute(*operands)
        result = TensorHandle(values, handle.dtype if not is_reflected and (like is left or left.shape) else kind)
        if is_comparison:
            return tensor(result, like.type.with_element_ty(tl.int1) if like.shape else tl.int1)
        copy = object.__new__(tensor)
        copy.__dict__.update(like.__dict__, handle=result)
        return copy

    return _moving(computed, operator) if name == "add" and not is_reflected else computed


def _moving(computed: Callable[[Any, Any], Any], operator: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the addition of tensors, `computed` or of an offset to a pointer."""
    from triton.runtime.interpreter import TensorHandle, interpreter_builder, tl

    def moved(left: Any, right: Any) -> Any:
        if not left.dtype.is_ptr():
            return computed(left, right)
        if type(right) is int and abs(right) <= _LARGEST:
            like, offset = left, TensorHandle(np.array([right], np.int32), tl.int32)
        elif (like := _operand(left, right)[1]) is None:
            return operator(left, right)
        else:
            offset = right.handle
        of_type = left.type if like is left else like.type.with_element_ty(left.dtype)
        return tl.core.tensor(interpreter_builder.create_addptr(left.handle, offset), of_type)

    return moved


def fits(exact: Any, kind: Any) -> bool:
    """Return whether all values, (…) int64, are values of an integer type."""
    if exact.size == 1:
        return bool(kind.get_int_min_value() <= exact.item() <= kind.get_int_max_value())
    return not exact.size or bool(kind.get_int_min_value() <= exact.min() and exact.max() <= kind.get_int_max_value())


def _assert_no_overflow(left: Any, right: Any, operation: Callable[..., Any]) -> None:
    """Assert that an operation on integers does not overflow; those of uint32 may wrap around, as in a hash.

    TritonSemantic.binary_op_sanitize_overflow_impl asserts this with nine interpreted operations, of uint32 as well.
    """
    from triton.runtime.interpreter import interpreter_builder

    kind, name = left.type.scalar, operation.__name__
    if interpreter_builder.options.debug and kind.int_bitwidth < 64 and kind.name != "uint32":
        is_fitting = fits(_CHECKED[name](left.handle.data, right.handle.data, dtype=np.int64), kind)
        if not is_fitting:
            interpreter_builder.create_assert(False, f"{kind.name} overflow detected for operation {name}")
