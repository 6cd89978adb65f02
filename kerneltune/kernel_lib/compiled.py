"""Run functions of torch operators as variants, operator by operator or by torch.compile."""

import types
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import Any

import torch

from kerneltune.spec import Config, Inputs, Outputs

EAGER, DEFAULT = "eager", "default"
"""Modes in addition to torch.compile's modes: no compilation, and torch.compile without a mode."""


@cache
def compiled_for(function: Callable[..., Any], *_case: Hashable, mode: str | None = None) -> Callable[..., Any]:
    """Compile `function` without a graph break, separately for every case: no case runs a kernel made for another.

    torch keeps compiled functions by code object, and counts the functions of a code object against a limit. So each case has its
    own code object.
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


def call(function: Callable[..., Any], mode: str, tensors: tuple[torch.Tensor | None, ...], *options: Hashable) -> Any:
    """Call `function(*tensors, *options)` in a mode of torch.compile, or under `EAGER` as it is."""
    if mode == EAGER:
        return function(*tensors, *options)
    return call_compiled(function, tensors, *options, mode=None if mode == DEFAULT else mode)


def torch_run(
    function: Callable[..., tuple[torch.Tensor, ...]], tensors: str, results: str, options: str = ""
) -> Callable[[str, Inputs, Config], Outputs]:
    """Return the run of the variants that are a function of torch operators; the run takes the mode of `call` first.

    Args:
        function: takes tensors, then options; returns the results.
        tensors: names of inputs, separated by spaces; a tensor may be None.
        results: names of the outputs, likewise.
        options: names of further inputs, likewise.
    """
    return partial(_run, function, tensors.split(), results.split(), options.split())


def _run(
    function: Callable[..., Any],
    tensors: list[str],
    results: list[str],
    options: list[str],
    mode: str,
    inputs: Inputs,
    _config: Config,
) -> Outputs:
    found = call(function, mode, tuple(inputs[name] for name in tensors), *(inputs[name] for name in options))
    return dict(zip(results, found, strict=True))
