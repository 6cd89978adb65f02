"""Reduce and scan by a kernel's own function in log2(n) steps over blocks, as a GPU does; Triton's interpreter calls it n times.

A launch with a tl.reduce of 4096 elements by a maximum with its index: 98 -> 1.6 ms (timed by a script, 2026-11-30).
"""

import ast
import functools
from collections.abc import Callable
from inspect import getsource
from textwrap import dedent
from typing import Any

import numpy as np


def reduced(reduction: Any, by_elements: Callable[..., Any], tensors: tuple[Any, ...]) -> Any:
    """Return the results of a reduction by a function of two elements: neighbours are combined until one element is left."""
    if not _takes_blocks(reduction.combine_fn):
        return by_elements(reduction, tensors)
    whole, axis = reduction.axis is None, reduction.axis or 0
    shape = tensors[0].handle.data.shape
    parts = [tensor.handle.data.reshape(-1) if whole else np.moveaxis(tensor.handle.data, axis, 0) for tensor in tensors]
    while len(parts[0]) > 1:
        parts = _combined(reduction, tensors, [part[0::2] for part in parts], [part[1::2] for part in parts])
    results = [part[0] for part in parts]
    if reduction.keep_dims:
        results = [result.reshape((1,) * len(shape)) if whole else np.expand_dims(result, axis) for result in results]
    return [reduction.to_tensor(result, tensor.dtype) for result, tensor in zip(results, tensors, strict=True)]


def scanned(scan: Any, by_elements: Callable[..., Any], tensors: tuple[Any, ...]) -> Any:
    """Return the results of a scan by a function of two elements: each is combined with the element 1, 2, 4, … before it."""
    if not _takes_blocks(scan.combine_fn):
        return by_elements(scan, tensors)
    parts = [np.moveaxis(tensor.handle.data, scan.axis, 0).copy() for tensor in tensors]
    distance = 1
    while distance < len(parts[0]):
        before = [np.concatenate([np.zeros_like(part[:distance]), part[:-distance]]) for part in parts]
        for part, combined in zip(parts, _combined(scan, tensors, before, parts), strict=True):
            part[distance:] = combined[distance:]
        distance *= 2
    results = [np.moveaxis(part, 0, scan.axis) for part in parts]
    return [scan.to_tensor(result, tensor.dtype) for result, tensor in zip(results, tensors, strict=True)]


def _combined(operation: Any, tensors: tuple[Any, ...], lefts: list[Any], rights: list[Any]) -> list[Any]:
    """Return what the function of an operation gives for blocks of elements."""
    from triton.runtime.interpreter import TensorHandle, tl

    def block(values: Any, tensor: Any) -> Any:
        return tl.core.tensor(TensorHandle(values, tensor.dtype.scalar), tl.block_type(tensor.dtype.scalar, list(values.shape)))

    operands = [block(values, tensor) for side in (lefts, rights) for values, tensor in zip(side, tensors, strict=True)]
    given = operation.combine_fn.rewrite()(*operands)
    results = given if isinstance(given, tuple | list | tl.core.tuple) else (given,)
    arrays = [result.handle.data if isinstance(result, tl.core.tensor) else np.asarray(result) for result in results]
    return [np.broadcast_to(array, left.shape).astype(left.dtype) for array, left in zip(arrays, lefts, strict=True)]


@functools.cache
def _takes_blocks(function: Any) -> bool:
    """Return whether a kernel's function may be called with blocks in place of elements: no `if` runs, and it can be read."""
    try:
        tree = ast.parse(dedent(getsource(function.fn)))
    except (AttributeError, OSError, SyntaxError, TypeError):
        return False
    if not hasattr(function, "rewrite") or any(isinstance(node, ast.If | ast.IfExp | ast.While) for node in ast.walk(tree)):
        return False
    called = map(function.fn.__globals__.get, function.fn.__code__.co_names)
    return all(_takes_blocks(each) for each in called if hasattr(each, "rewrite") and each is not function)
