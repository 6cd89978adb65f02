"""Follow sums, differences and products of uint32 that wrap around into addresses, in launches without memory.

A hash wraps around, and its remainder or some of its bits choose a place. An index that wraps around is a wrong address.
"""

from collections.abc import Callable
from functools import partialmethod
from typing import Any

import numpy as np

from kerneltune.interpreter.facts import WITHOUT_MEMORY
from kerneltune.interpreter.faults import KernelFaultError, line_of
from kerneltune.interpreter.quick import fits

_FOLLOWED = frozenset({np.add, np.subtract, np.multiply})
_MOVING = frozenset({np.broadcast_to, np.concatenate, np.expand_dims, np.stack, np.transpose, np.where})


class _Wrapped(np.ndarray[Any, Any]):
    """Hold integers of which some wrapped around; sums, differences, products, wide casts and moves of them are followed.

    Attributes:
        cause: the operation and its line.
    """

    cause = ""

    def __array_finalize__(self, source: Any) -> None:
        self.cause = getattr(source, "cause", "")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        result = getattr(ufunc, method)(*map(np.asarray, inputs), **kwargs)
        return _followed(result, self) if ufunc in _FOLLOWED and method == "__call__" else result

    def __array_function__(self, function: Any, types: Any, args: Any, named: Any) -> Any:
        result = super().__array_function__(function, types, args, named)
        return _followed(result, self) if function in _MOVING else result

    def astype(self, dtype: Any, *args: Any, **named: Any) -> Any:
        result = np.asarray(self).astype(dtype, *args, **named)
        return _followed(result, self) if result.dtype.kind in "iu" and result.itemsize >= 4 else result


def wrapping_parts() -> dict[tuple[Any, str], Any]:
    """Return the parts of the interpreter, (owner, name), that are replaced in the mode `modes.strict`."""
    from triton.runtime.interpreter import InterpreterBuilder

    def computed(builder: Any, compute: Callable[..., Any], exactly: Callable[..., Any], left: Any, right: Any) -> Any:
        result, kind = compute(builder, left, right), left.dtype.scalar
        if WITHOUT_MEMORY.get() and kind.name == "uint32" and not fits(exactly(left.data, right.data, dtype=np.int64), kind):
            result.data = result.data.view(_Wrapped)
            result.data.cause = f"uint32 overflow detected for operation {exactly.__name__[:3]}{line_of()}"
        return result

    def splatted(builder: Any, splat: Callable[..., Any], kind: Any, value: Any) -> Any:
        result = splat(builder, kind, value)
        result.data = _followed(result.data, value.data)
        return result

    return {
        (InterpreterBuilder, "create_add"): partialmethod(computed, InterpreterBuilder.create_add, np.add),
        (InterpreterBuilder, "create_sub"): partialmethod(computed, InterpreterBuilder.create_sub, np.subtract),
        (InterpreterBuilder, "create_mul"): partialmethod(computed, InterpreterBuilder.create_mul, np.multiply),
        (InterpreterBuilder, "create_splat"): partialmethod(splatted, InterpreterBuilder.create_splat),
    }


def require_unwrapped(addresses: Any, where: Callable[[], str]) -> None:
    """Raise KernelFaultError for accessed addresses of integers that wrapped around; `where` names the access."""
    if isinstance(addresses, _Wrapped) and addresses.size:
        raise KernelFaultError(f"{addresses.cause}, whose result is an address{where()}")


def _followed(result: Any, source: Any) -> Any:
    """Return a result with the cause of the values that it was made of, if they have a cause."""
    if not isinstance(source, _Wrapped):
        return result
    followed = result.view(_Wrapped)
    followed.cause = source.cause
    return followed
