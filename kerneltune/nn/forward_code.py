"""Read from the code of a module's forward pass which functions it calls, without running it."""

import dis
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn


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
        waiting += [(found, owner) for found in inspect.getclosurevars(function).nonlocals.values()]
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
        yield inspect.getattr_static(type(owner), name, None), owner
        yield scope.get(name), owner
