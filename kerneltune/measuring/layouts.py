"""Inputs with gaps between rows or elements, and the inputs of which host code reads the layout."""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from kerneltune.errors import is_own
from kerneltune.interpreter.modes import replaced
from kerneltune.spec import Inputs

EVERY_OUTER_AXIS, ROWS, ELEMENTS = 0, 1, -1
"""Places of gaps: at every outer axis, so that no stride follows from another; between rows; between elements and rows."""


def with_gaps(inputs: Inputs, around: Mapping[str, int] | None = None) -> Inputs:
    """Return copies of the matrices among some inputs, with gaps of different sizes between rows, multiples of 16 bytes.

    Args:
        around: place of the gaps of an input, `ROWS` without it: one of the constants, or the number of inner axes around which
            the gaps lie, such as 2 for gaps between matrices.
    """
    copies: dict[str, torch.Tensor] = {}
    owners = Counter(value.untyped_storage().data_ptr() for value in inputs.values() if isinstance(value, torch.Tensor))
    for name, value in inputs.items():
        if type(value) is not torch.Tensor or value.ndim < 2 or not value.numel():
            continue
        order = sorted(range(value.ndim), key=value.stride)
        if owners[value.untyped_storage().data_ptr()] == 1 and value.stride(order[0]) == 1 and 0 not in value.stride():
            strides, inner = [0] * value.ndim, (around or {}).get(name, ROWS)
            step = 2 if inner == ELEMENTS else 1
            for number, axis in enumerate(order, 1):
                strides[axis] = step
                step *= value.shape[axis]
                if inner == EVERY_OUTER_AXIS or number == abs(inner):
                    step += (32 * (len(copies) + 1)) // value.element_size()
            memory = torch.full((step * value.element_size(),), 0xFF, dtype=torch.uint8, device=value.device).view(value.dtype)
            copies[name] = memory.as_strided(value.shape, strides).copy_(value.detach()).requires_grad_(value.requires_grad)
    return copies


def names_by_storage(values: Mapping[str, Any]) -> dict[int, str]:
    """Return the address of each tensor's storage -> the name of the tensor, the last of several that share the storage."""
    return {value.untyped_storage().data_ptr(): name for name, value in values.items() if isinstance(value, torch.Tensor)}


@contextmanager
def noting_layouts(inputs: Inputs, folder: str) -> Iterator[list[str]]:
    """List the inputs of which code in a folder asks for strides, whether they are contiguous, or a contiguous copy, in order.

    A copy of another view, such as `x.t().contiguous()`, tells nothing of the input.
    """
    owners = names_by_storage(inputs)
    read = list[str]()

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
            frame = inspect.currentframe()
            caller = frame.f_back if frame else None
            owner = (
                owners.get(tensor.untyped_storage().data_ptr()) if caller and is_own(folder, caller.f_code.co_filename) else None
            )
            if owner and not (method is contiguous and tensor.shape != inputs[owner].shape):
                read.append(owner)
            return method(tensor, *args, **named)

        return call

    contiguous = torch.Tensor.contiguous
    names = ("stride", "is_contiguous", "contiguous") if folder else ()
    with replaced({(torch.Tensor, name): noted(getattr(torch.Tensor, name)) for name in names}):
        yield read
