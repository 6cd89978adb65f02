"""Count the statements that a program of a launch runs, from the code and the arguments of its kernel, without running it."""

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from kerneltune.rounding import cdiv

_UNKNOWN = object()
_CAST = re.compile(r"\.to\([\w.]*\)")


def statements_of_program(kernel: Any, arguments: Mapping[str, Any], grid: Sequence[int]) -> int:
    """Return the number of statements that the middle program of a launch runs, also in device functions.

    A loop whose bounds depend on loaded values turns once, and the longer side of an `if` on such values counts.
    """
    values = {name: getattr(value, "value", value) for name, value in arguments.items() if not hasattr(value, "data_ptr")}
    hashable = ((name, type(value), value) for name, value in values.items() if getattr(value, "__hash__", None))
    return _of_kernel(kernel, tuple(hashable), tuple(grid))


@functools.lru_cache(maxsize=1 << 14)
def _of_kernel(kernel: Any, typed: tuple[tuple[str, type, Any], ...], grid: tuple[int, ...]) -> int:
    language = SimpleNamespace(
        program_id=lambda axis: grid[axis] // 2, num_programs=lambda axis: grid[axis], cdiv=cdiv, minimum=min, maximum=max,
        range=lambda *bounds, **_options: range(*bounds), static_range=lambda *bounds, **_options: range(*bounds),
    )  # fmt: skip
    return _of_function(kernel, {name: value for name, _type, value in typed}, language)


def _of_function(function: Any, arguments: Mapping[str, Any], language: SimpleNamespace) -> int:
    tree, names = _tree(function)
    known = {name: language if isinstance(value, ModuleType) else value for name, value in names.items()}
    parameters = dict.fromkeys((arg.arg for arg in tree.args.args), _UNKNOWN)
    return _of_body(tree.body, known | parameters | dict(arguments), language)


def _of_body(statements: Sequence[ast.stmt], known: dict[str, Any], language: SimpleNamespace) -> int:
    """Return the number of statements that run; `known` holds the values of names, and gets those that statements assign."""
    count = len(statements)
    for node in statements:
        if isinstance(node, ast.If):
            is_true = _value(node.test, known)
            sides = [node.body, node.orelse] if is_true is _UNKNOWN else [node.body if is_true else node.orelse]
            count += max(_of_body(side, known, language) for side in sides)
        elif isinstance(node, ast.For | ast.While):
            turns = _value(node.iter, known) if isinstance(node, ast.For) else _UNKNOWN
            known.update(dict.fromkeys(_assigned(node), _UNKNOWN))
            count += _of_body(node.body, known, language) * (len(turns) if isinstance(turns, range) else 1)
        else:
            count += sum(_of_call(call, known, language) for call in _calls(node))
            value = _value(node.value, known) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value else _UNKNOWN
            known.update(dict.fromkeys(_assigned(node), value if len(_assigned(node)) == 1 else _UNKNOWN))
    return count


def _of_call(call: ast.Call, known: Mapping[str, Any], language: SimpleNamespace) -> int:
    """Return the number of statements that a call of a device function runs; 0 for a function of the language."""
    function = getattr(_value(call.func, known), "fn", None)
    if not inspect.isfunction(function):
        return 0
    operands = inspect.signature(function).bind_partial(*call.args, **{it.arg: it.value for it in call.keywords if it.arg})
    values = {name: _value(operand, known) for name, operand in operands.arguments.items() if isinstance(operand, ast.expr)}
    return _of_function(function, values, language)


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """Return the value of an expression, or _UNKNOWN."""
    try:
        return eval(_code(node), {}, known)
    except Exception:  # an operation on a tensor or on a loaded value
        return _UNKNOWN


@functools.cache
def _code(node: ast.expr) -> CodeType:
    return compile(_CAST.sub("", ast.unparse(node)), "<expression>", "eval")


@functools.cache
def _tree(function: Any) -> tuple[ast.FunctionDef, Mapping[str, Any]]:
    """Return the syntax tree of a function, and its global names with the values of constants."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return tree, {name: getattr(value, "value", value) for name, value in function.__globals__.items()}  # type: ignore[return-value]


@functools.cache
def _calls(node: ast.stmt) -> tuple[ast.Call, ...]:
    return tuple(part for part in ast.walk(node) if isinstance(part, ast.Call))


@functools.cache
def _assigned(node: ast.stmt) -> frozenset[str]:
    return frozenset(part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
