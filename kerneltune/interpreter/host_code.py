"""Note facts of host code while it runs: the sides of branches, and the limits that expressions set to sizes without an `if`.

A limit is a comparison, `min`, `max`, `clamp`, a cast to 8 or 16 bits, a slice or a `//`. Its operands are computed again
before its line runs, if they are names, attributes, items, whole numbers and calls of `len`, `min`, `max` and `cdiv`; other
limits give no fact.
"""

import ast
import functools
import linecache
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import CodeType, FrameType
from typing import Any, NamedTuple

from kerneltune.interpreter.facts import Fact, note

_CALLS = ("min", "max", "len", "cdiv", "next_power_of_2", "size", "numel", "dim", "slice")
"""Functions and methods that are called again to compute the operands of a limit: they change nothing."""
_CLAMPS = ("clamp", "clamp_", "clamp_max", "clamp_min", "clip", "to")
"""Methods that limit the whole numbers of a tensor, whose values a launch without memory does not know."""
_MOST_IN_TYPES = {"torch.int8": 2**7 - 1, "torch.uint8": 2**8 - 1, "torch.int16": 2**15 - 1, "torch.uint16": 2**16 - 1}
"""Element types whose largest whole number limits the numbers that are cast to them."""
_ASKS_FOR_MEMORY = re.compile(r"is_meta\b|(['\"])meta\1")
"""Conditions that are no facts: tensors of bench cases have no memory, those of check cases have."""
_LEAST_OF_SIZES = 16
"""Least limit of a `clamp` that is compared with sizes: smaller limits are of bits and flags."""
_UNREPEATED = (ast.NamedExpr, ast.Lambda, ast.comprehension, ast.Await, ast.Yield, ast.YieldFrom)


class _Limit(NamedTuple):
    """Hold an expression that limits a size.

    Attributes:
        function: name of the function with the expression.
        operands: code that gives the operands as a tuple.
        outcomes: function of the text, the local names and the operands that gives the texts of facts.
    """

    function: str
    text: str
    operands: CodeType
    outcomes: Callable[..., Iterable[str]]


@contextmanager
def noting_host(folder: str, note: Callable[[Fact], object] = note) -> Iterator[None]:
    """Note limits, and the lines that follow an `if`, in host code of a folder, unless a debugger traces this process."""

    def begin(frame: FrameType, _event: str, _arg: object) -> Any:
        code, before = frame.f_code, 0
        if not code.co_filename.startswith(folder):
            return None
        limits = _limits(code.co_filename)

        def step(frame: FrameType, event: str, _arg: object) -> Any:
            nonlocal before
            if event == "line":
                if condition := _condition(code.co_filename, before):
                    note(Fact("branch", f"line {frame.f_lineno} after `{condition}`", code.co_name))
                for limit in limits.get(frame.f_lineno, ()):
                    for outcome in _outcomes(limit, frame):
                        note(Fact("branch", outcome, limit.function))
                before = frame.f_lineno
            return step

        return step

    outer = sys.gettrace()
    if folder and outer is None:
        sys.settrace(begin)
    try:
        yield
    finally:
        sys.settrace(outer)


@contextmanager
def untraced() -> Iterator[None]:
    """Switch the trace function off: it takes longer than the kernels and sources that it would trace."""
    trace = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(trace)


@functools.cache
def _condition(file: str, line: int) -> str:
    """Return the `if` at a line, empty for other statements and for a question whether a tensor has memory."""
    text = linecache.getline(file, line).strip().removesuffix(":")
    return text if text.startswith(("if ", "elif ")) and not _ASKS_FOR_MEMORY.search(text) else ""


def _outcomes(limit: _Limit, frame: FrameType) -> list[str]:
    """Return the texts of what a limit does to the values of a frame; none where an operand is not known."""
    with untraced(), suppress(Exception):  # a name that the statement itself binds, or an operand of another kind
        return list(limit.outcomes(limit.text, frame.f_locals, *eval(limit.operands, frame.f_globals, frame.f_locals)))
    return []


def _condition_outcomes(text: str, _local: Mapping[str, Any], is_true: object) -> Iterator[str]:
    if isinstance(is_true, bool) and not _ASKS_FOR_MEMORY.search(text):
        yield f"`{text}` is {is_true}"


def _extreme_outcomes(text: str, _local: Mapping[str, Any], extreme: Callable[..., Any], *operands: object) -> Iterator[str]:
    if all(type(operand) is int for operand in operands):
        of_call = extreme(*operands)
        if operands.count(of_call) == 1:  # a limit that a size equals cuts nothing
            yield f"`{text}` is operand {operands.index(of_call) + 1}"


def _slice_outcomes(axis: int, text: str, _local: Mapping[str, Any], sliced: Any, bounds: slice) -> Iterator[str]:
    size = sliced.shape[axis]
    yield f"`{text}` is {'whole' if len(range(size)[bounds]) == size else 'a part'}"


def _division_outcomes(text: str, _local: Mapping[str, Any], size: object, divisor: object) -> Iterator[str]:
    if type(size) is int and type(divisor) is int and divisor > 1:
        yield f"`{text}` is {'0' if 0 <= size < divisor else 'rounded down' if size % divisor else 'exact'}"


def _clamp_outcomes(text: str, local: Mapping[str, Any], numbers: Any, *limits: object) -> Iterator[str]:
    """Name each local size whose places are above a limit, as whole numbers are often places along an axis."""
    sizes = {name: value for name, value in local.items() if type(value) is int}
    for name, tensor in ((name, value) for name, value in local.items() if hasattr(value, "data_ptr")):
        sizes |= {f"{name}.shape[{axis}]": size for axis, size in enumerate(tensor.shape)}
    for limit in (_MOST_IN_TYPES.get(str(it), it) for it in limits if not numbers.is_floating_point()):
        if type(limit) is int and limit >= _LEAST_OF_SIZES:
            yield from (f"{name} - 1 > {limit} beside `{text}`" for name, size in sizes.items() if size - 1 > limit)


@functools.cache
def _limits(file: str) -> Mapping[int, list[_Limit]]:
    """Return the limits in the functions of a file by each line of their statements, without the conditions of `if`."""
    of_line: dict[int, list[_Limit]] = defaultdict(list)
    with suppress(SyntaxError):
        for function in ast.walk(ast.parse("".join(linecache.getlines(file)))):
            if isinstance(function, ast.FunctionDef) and not any("jit" in ast.unparse(it) for it in function.decorator_list):
                for node in function.body:
                    _collect(node, function.name, of_line)
    return of_line


def _collect(node: ast.AST, function: str, of_line: dict[int, list[_Limit]]) -> None:
    """Add the limits of a statement and of statements within it, but for functions within."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return
    for part in ast.iter_child_nodes(node):
        if isinstance(part, ast.stmt | ast.ExceptHandler | ast.match_case):
            _collect(part, function, of_line)
        elif isinstance(part, ast.expr):
            for limit in _limits_within(part, function, isinstance(node, ast.If)):
                for line in range(getattr(node, "lineno", part.lineno), (part.end_lineno or part.lineno) + 1):
                    of_line[line].append(limit)


def _limits_within(node: ast.AST, function: str, is_condition: bool = False) -> Iterator[_Limit]:
    """Yield the limits of an expression; comparisons of the condition of an `if` are noted by the line that follows."""
    for outcomes, operands in _operands(node, is_condition):
        named = operands[0] if outcomes is _condition_outcomes else node
        text = f"({', '.join(map(ast.unparse, operands))},)"
        parts = [part for operand in operands for part in ast.walk(operand)]
        called = [ast.unparse(part.func).rpartition(".")[2] for part in parts if isinstance(part, ast.Call)]
        if set(called) <= set(_CALLS) and not any(isinstance(part, _UNREPEATED) for part in parts):
            yield _Limit(function, ast.unparse(named), compile(text, "<limit>", "eval"), outcomes)
    for part in ast.iter_child_nodes(node):
        yield from _limits_within(part, function, is_condition and isinstance(node, ast.BoolOp | ast.UnaryOp))


def _operands(node: ast.AST, is_condition: bool) -> Iterator[tuple[Callable[..., Iterable[str]], list[ast.expr]]]:
    """Yield the function that gives the facts of a limit, with the operands that the function takes."""
    match node:
        case ast.Compare() if not is_condition:
            yield _condition_outcomes, [node]
        case ast.IfExp(test) if not isinstance(test, ast.Compare | ast.BoolOp):
            yield _condition_outcomes, [test]
        case ast.Call(ast.Name("min" | "max") as extreme, [_, _, *_] as operands):
            yield _extreme_outcomes, [extreme, *operands]
        case ast.Call(ast.Attribute(numbers, method), operands, named) if method in _CLAMPS:
            yield _clamp_outcomes, [numbers, *operands, *(keyword.value for keyword in named)]
        case ast.BinOp(size, ast.FloorDiv(), divisor):
            yield _division_outcomes, [size, divisor]
        case ast.Subscript(sliced, place):
            for axis, part in enumerate(place.elts if isinstance(place, ast.Tuple) else [place]):
                if isinstance(part, ast.Slice) and (part.lower or part.upper):
                    ends = [end or ast.Constant(None) for end in (part.lower, part.upper, part.step)]
                    yield partial(_slice_outcomes, axis), [sliced, ast.Call(ast.Name("slice"), ends, [])]
                elif isinstance(part, ast.Constant) and part.value in (None, ...):
                    break  # the axis of further parts is not known
