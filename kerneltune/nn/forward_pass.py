"""Read which functions the code of a forward pass names, and run the forward pass of experts with small weights."""

import dis
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SCALES = (0.18, 8.0)
"""Factors of inputs: gates around 1, where SiLU and GELU differ, and around 45, which a clamped SwiGLU would cut."""
_LARGEST_ERROR = 0.02
"""Largest error of SwiGLU in bf16, relative to the norm. GELU in place of SiLU makes 0.17."""


def computes_swiglu(module: Any, E: int) -> bool:
    """Return whether a module's own forward pass, run with small weights of E experts, computes silu(x w1) * (x w3) times w2."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    small = object.__new__(type(module))  # shares the module's attributes, but for what a forward pass may change
    weights = {"w1": made(E, 16, 32), "w2": made(E, 32, 16), "w3": made(E, 16, 32)}
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}
    vars(small).update(vars(module), _buffers=buffers, _parameters={name: nn.Parameter(w) for name, w in weights.items()})
    counts = torch.arange(E, device=device) % 2 * 8 + 8
    of = torch.arange(E, device=device).repeat_interleave(counts)
    w1, w2, w3 = (w.float()[of] for w in weights.values())
    for scale in _SCALES:
        x = scale * made(len(of), 32)
        rows = x.float()[:, None]
        want = ((F.silu(rows @ w1.mT) * (rows @ w3.mT)) @ w2.mT)[:, 0]
        try:
            with torch.no_grad():
                got = type(module).forward(small, x, counts).float()
            if not bool((got - want).norm() <= _LARGEST_ERROR * want.norm()):
                return False
        except Exception:  # of the module's own code
            return False
    return True


def names_in_forward(module: nn.Module) -> set[str]:
    """Return the names that a module's forward pass uses, and `@` if the pass multiplies by the operator.

    Follows the methods of the module, the children that it names, and Python functions outside torch. Attributes of other
    objects count by name alone: functions behind them are not followed.
    """
    names: set[str] = set()
    seen: set[int] = set()
    waiting: list[tuple[Any, nn.Module]] = [(type(module).forward, module)]
    while waiting:
        function, owner = waiting.pop()
        function = getattr(function, "__func__", function)
        is_known = id(function) in seen or not isinstance(function, FunctionType)
        if is_known or function.__module__.partition(".")[0] == "torch":
            continue
        seen.add(id(function))
        used = set(_names(function.__code__))
        names |= used
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # a variable without a value yet
                waiting.append((cell.cell_contents, owner))
        waiting += _callees(used, function.__globals__, owner)
    return names


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a code object and the functions inside it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
    yield from ("@" for instruction in dis.get_instructions(code) if instruction.argrepr in ("@", "@="))


def _callees(names: Iterable[str], scope: dict[str, Any], owner: nn.Module) -> Iterator[tuple[Any, nn.Module]]:
    """Yield the objects that the names may mean in a method of a module or in a function of its file, each with its module."""
    children = dict(owner.named_children())
    for name in names:
        child = children.get(name)
        if child is not None:
            yield type(child).forward, child
        yield vars(owner).get(name), owner
        yield from ((vars(kind).get(name), owner) for kind in type(owner).__mro__)  # `super().forward` means those of bases
        yield scope.get(name), owner
