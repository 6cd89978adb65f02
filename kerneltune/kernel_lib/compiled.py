"""torch.compile as operators are compared with it. Knows no operator. May import torch."""

import types
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch


@cache
def compiled_for(function: Callable[..., Any], *_case: Hashable, mode: str | None = None) -> Callable[..., Any]:
    """Compile `function` without a graph break, separately for every case: no case runs a kernel made for another.

    torch keeps what it compiled, and counts it against a limit, by code object: each case has one of its own.
    """

    def call(*arguments: Any) -> Any:
        return function(*arguments)

    alone = types.FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
    backend = "inductor" if torch.cuda.is_available() else "aot_eager"
    compiled: Callable[..., Any] = torch.compile(alone, mode=mode, dynamic=False, fullgraph=True, backend=backend)
    return compiled


def call_compiled(
    function: Callable[..., Any], tensors: tuple[torch.Tensor | None, ...], *options: Hashable, mode: str | None = None
) -> Any:
    """Call `function(*tensors, *options)`, compiled for these shapes, dtypes and options; None stays None."""
    shapes = tuple(None if t is None else (tuple(t.shape), t.dtype) for t in tensors)
    return compiled_for(function, shapes, options, mode=mode)(*tensors, *options)
