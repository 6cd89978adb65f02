"""Derive the functions of a variant and a torch operator from an operator's public function and constants."""

import inspect
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from kerneltune.compat import CustomOpDef, untraced
from kerneltune.spec import Case, Config, Inputs, Outputs

_DIRECT_ONLY = frozenset({"config", "out"})
"""Parameters of a public function that its torch operator lacks."""

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(value: Any) -> Callable[[Case], Any]:
    """Return a function of the case with this value: a space or a default that no case changes."""
    return partial(_value, value)


def _value(value: Any, _case: Case) -> Any:
    return value


def run_of(function: Callable[..., Any], *names: str) -> Callable[[Inputs, Config], Outputs]:
    """Return the `run` of a variant that calls a public function.

    Args:
        function: function of the case's inputs by name, and of `config`.
        names: names of its results, in order; none for results in a NamedTuple, whose fields are their names.
    """
    return partial(_run, function, names)


def _run(function: Callable[..., Any], names: Sequence[str], inputs: Inputs, config: Config) -> Outputs:
    results = function(**inputs, config=config)
    named = zip(names, _tensors(results), strict=True) if names else results._asdict().items()
    return {name: tensor for name, tensor in named if tensor is not None}


def custom_op(name: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Register a function as a custom operator of torch, as `torch.library.custom_op` does, that the host calls in less time.

    Because torch's wrapper looks for aliases after every call, the dispatcher calls the function itself. So functions must not
    return their arguments or views of their arguments.

    Args:
        name: name with the namespace.
        mutates_args: names of the parameters that the function writes to.
    """

    def register(function: Callable[..., Any]) -> CustomOpDef:
        operator = torch.library.custom_op(name, function, mutates_args=mutates_args)
        torch.library.impl(name, ("cpu", "cuda"), untraced(function))
        return operator

    return register


def torch_operator(
    results: Callable[..., Any], *, name: str = "", mutates: Sequence[str] = (), without: Collection[str] = ()
) -> Callable[[Function], Function]:
    """Register a function as the torch operator `kerneltune::NAME`, which torch.compile and export can trace.

    The operator has the function's parameters except `config` and `out`, and takes each by position too. It returns a tuple
    of tensors, or a list where the function may leave some out. It cannot be differentiated.

    Args:
        results: function that allocates the results and launches nothing; its parameters are parameters of the function.
        name: name of the operator; the function's name if empty.
        mutates: names of the tensors that the function writes to.
        without: further parameters that the operator lacks; they have defaults.
    """

    def register(function: Function) -> Function:
        signature, as_list = _signature(function, _DIRECT_ONLY.union(without))
        needed = inspect.signature(results).parameters.keys() & signature.parameters.keys()
        names = tuple(signature.parameters)

        def call(*args: Any, **kwargs: Any) -> Any:
            return _plain(function(**dict(zip(names, args, strict=False)), **kwargs), as_list)

        def fake(*args: Any, **kwargs: Any) -> Any:
            bound = _bound(signature, args, kwargs)
            return _plain(results(**{name: bound[name] for name in needed}), as_list)

        vars(call)["__signature__"] = signature
        call.__doc__ = function.__doc__
        custom_op(f"kerneltune::{name or function.__name__}", mutates)(call).register_fake(fake)
        return function

    return register


def _bound(signature: inspect.Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _signature(function: Callable[..., Any], without: Collection[str]) -> tuple[inspect.Signature, bool]:
    """Return the operator's signature, and whether its results come as a list."""
    types = typing.get_type_hints(function)
    parameters = [
        parameter.replace(kind=parameter.POSITIONAL_OR_KEYWORD, annotation=types[name])
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in without
    ]
    leaves = list(_leaves(types["return"]))
    as_list = Tensor | None in leaves
    returned = list[Tensor] if as_list else leaves[0] if len(leaves) == 1 else tuple[tuple(leaves)]  # type: ignore[misc]
    return inspect.Signature(parameters, return_annotation=None if leaves == [type(None)] else returned), as_list


def _leaves(annotation: Any) -> Iterator[Any]:
    """Flatten a type of tuples and NamedTuples of tensors, which may be None."""
    fields = typing.get_type_hints(annotation) if hasattr(annotation, "_fields") else {}
    parts = tuple(fields.values()) if fields else typing.get_args(annotation) if typing.get_origin(annotation) is tuple else ()
    if not parts:
        yield annotation
    for part in parts:
        yield from _leaves(part)


def _tensors(results: Any) -> Iterator[Any]:
    """Flatten results: tensors, and tuples of results."""
    if not isinstance(results, tuple):
        yield results
        return
    for result in results:
        yield from _tensors(result)


def _plain(results: Any, as_list: bool) -> Any:
    if results is None or isinstance(results, Tensor):
        return [results] if as_list else results
    found = results if not any(isinstance(part, tuple) for part in results) else tuple(_tensors(results))
    if as_list:
        return [tensor for tensor in found if tensor is not None]
    return tuple(found) if len(found) > 1 else found[0]
