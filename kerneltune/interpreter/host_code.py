"""Note facts of host code while it runs: the sides of branches, and the limits that expressions set to sizes without an `if`.

A limit is a comparison, `min`, `max`, `clamp`, a cast to 8 or 16 bits, a slice or a `//`. Its operands are computed again
before its line runs, if they are names, attributes, items, integers and calls of `len`, `min`, `max` and `cdiv`; other
limits give no fact, nor do limits in parts of an `and`, an `or` or an `if` that Python does not reach.
"""

import ast
import functools
import itertools
import linecache
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from types import CodeType, FrameType
from typing import Any

from kerneltune.errors import is_own
from kerneltune.interpreter.facts import Fact, compared_for_equality, comparison, note_facts

_CALLS = {"min", "max", "len", "cdiv", "next_power_of_2", "size", "numel", "dim", "slice", "locals"}
"""Functions and methods that are called again to compute the operands of a limit: they change nothing."""
_CLAMPS = ("clamp", "clamp_", "clamp_max", "clamp_min", "clip", "to")
"""Methods that limit the integers of a tensor, whose values a launch without memory does not know."""
_MOST_IN_TYPES = {"torch.int8": 2**7 - 1, "torch.uint8": 2**8 - 1, "torch.int16": 2**15 - 1, "torch.uint16": 2**16 - 1}
"""Element types whose largest integer limits the numbers that are cast to them."""
_ASKS_FOR_MEMORY = re.compile(r"is_meta\b|(['\"])meta\1")
"""Conditions that are no facts: tensors of check cases have memory, tensors of bench cases have none."""
_LEAST_OF_SIZES = 16
"""Least limit of a `clamp` that is compared with sizes: smaller limits are of bits and flags."""
_LOCAL_NAMES = ast.Call(ast.Name("locals"), [], [])
_UNREPEATED = (ast.NamedExpr, ast.Lambda, ast.comprehension, ast.Await, ast.Yield, ast.YieldFrom)
_Limit = Callable[[FrameType], list[Fact]]
"""Function of a frame that returns facts about the value of an expression in the frame, without their place."""


def noting_host(folder: str) -> AbstractContextManager[None]:
    """Note limits, and the lines that follow an `if`, in host code of a folder, unless a debugger traces this process."""

    def begin(frame: FrameType, _event: str, _arg: object) -> Any:
        code, condition = frame.f_code, ""
        if not is_own(folder, code.co_filename) or code.co_name == "<module>":
            return None
        limits, function = limits_of(code.co_filename), code.co_qualname.partition(".<locals>.<")[0].rpartition(".")[2]

        def step(frame: FrameType, event: str, _arg: object) -> Any:
            nonlocal condition
            if event == "line":
                facts = [Fact("branch", f"line {frame.f_lineno} after `{condition}`")] if condition else []
                facts += [fact for limit in limits.get(frame.f_lineno, ()) for fact in limit(frame)]
                note_facts(*(fact._replace(where=function) for fact in facts))
                condition = _condition(code.co_filename, frame.f_lineno)
            return step

        return step

    return _traced_by(begin if folder and sys.gettrace() is None else sys.gettrace())


@contextmanager
def _traced_by(function: Any) -> Iterator[None]:
    outer = sys.gettrace()
    sys.settrace(function)
    try:
        yield
    finally:
        sys.settrace(outer)


def untraced() -> AbstractContextManager[None]:
    """Switch the trace function off: it takes longer than the kernels and sources that it would trace."""
    return _traced_by(None)


@functools.cache
def _condition(file: str, line: int) -> str:
    """Return the `if` at a line, empty for other statements and for a question whether a tensor has memory."""
    text = linecache.getline(file, line).strip().removesuffix(":")
    return text if text.startswith(("if ", "elif ")) and not _ASKS_FOR_MEMORY.search(text) else ""


def _condition_texts(text: str, is_true: object) -> Iterator[str]:
    if isinstance(is_true, bool):
        yield f"`{text}` is {is_true}"


def _extreme_texts(text: str, extreme: Callable[..., Any], *operands: object) -> Iterator[str]:
    if all(type(operand) is int for operand in operands) and operands.count(of_call := extreme(*operands)) == 1:
        yield f"`{text}` is operand {operands.index(of_call) + 1}"  # a limit that a size equals cuts nothing


def _slice_texts(text: str, axis: int, sliced: Any, bounds: slice) -> Iterator[str]:
    size = sliced.shape[axis]
    yield f"`{text}` is {'whole' if len(range(size)[bounds]) == size else 'a part'}"


def _division_texts(text: str, size: object, divisor: object) -> Iterator[str]:
    if type(size) is int and type(divisor) is int and divisor > 1:
        yield f"`{text}` is {'0' if 0 <= size < divisor else 'rounded down' if size % divisor else 'exact'}"


def _clamp_texts(text: str, local: Mapping[str, Any], numbers: Any, *limits: object) -> Iterator[str]:
    """Name each local size whose places are above a limit that is no length, as integers are often places along an axis."""
    lengths = {
        f"{name}.shape[{axis}]": size
        for name, tensor in local.items() if hasattr(tensor, "data_ptr") for axis, size in enumerate(tensor.shape)
    }  # fmt: skip
    sizes = {name: value for name, value in local.items() if type(value) is int} | lengths
    given = [limit for limit in limits if type(limit) is not int or not {limit, limit + 1} & {*lengths.values()}]
    for limit in (_MOST_IN_TYPES.get(str(limit), limit) for limit in given if not numbers.is_floating_point()):
        if type(limit) is int and limit >= _LEAST_OF_SIZES:
            yield from (f"{name} - 1 > {limit} beside `{text}`" for name, size in sizes.items() if size - 1 > limit)


@functools.cache
def limits_of(file: str) -> Mapping[int, list[_Limit]]:
    """Return the limits in a file by each line of their statements; of conditions of `if`, those of equality alone."""
    of_line: dict[int, list[_Limit]] = defaultdict(list)
    with suppress(SyntaxError):
        for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
            is_statement = isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case)
            for part in (part for part in ast.iter_child_nodes(node) if is_statement and isinstance(part, ast.expr)):
                limits = list(_limits_within(part, isinstance(node, ast.If)))
                for line in range(getattr(node, "lineno", part.lineno), (part.end_lineno or part.lineno) + 1):
                    of_line[line] += limits
    return of_line


def _limits_within(node: ast.AST, is_condition: bool) -> Iterator[_Limit]:
    """Yield the limits of an expression; comparisons of the condition of an `if` are noted by the line that follows."""
    match node:
        case ast.Compare():
            yield from _limits_of_comparison(node, is_condition)
        case ast.IfExp(test) if not isinstance(test, ast.Compare):
            yield from _limit(_condition_texts, test, ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), test)))
        case ast.Call(ast.Name("min" | "max") as extreme, [_, _, *_] as operands):
            yield from _limit(_extreme_texts, node, extreme, *operands)
        case ast.Call(ast.Attribute(numbers, method), operands, named) if method in _CLAMPS:
            yield from _limit(_clamp_texts, node, _LOCAL_NAMES, numbers, *operands, *(keyword.value for keyword in named))
        case ast.BinOp(size, ast.FloorDiv(), divisor):
            yield from _limit(_division_texts, node, size, divisor)
        case ast.Subscript(sliced, place):
            parts = place.elts if isinstance(place, ast.Tuple) else [place]
            known = itertools.takewhile(lambda part: not (isinstance(part, ast.Constant) and part.value in (None, ...)), parts)
            for axis, part in enumerate(known):
                if isinstance(part, ast.Slice) and (part.lower or part.upper):
                    ends = [end or ast.Constant(None) for end in (part.lower, part.upper, part.step)]
                    yield from _limit(_slice_texts, node, ast.Constant(axis), sliced, ast.Call(ast.Name("slice"), ends, []))
    conditions = _conditions_of_parts(node)
    for child in ast.iter_child_nodes(node):
        limits = _limits_within(child, is_condition and isinstance(node, ast.BoolOp | ast.UnaryOp))
        reached = _code([condition]) if (condition := conditions.get(child)) else None
        yield from (partial(_if_reached, reached, limit) for limit in limits) if reached else limits


def _limits_of_comparison(node: ast.Compare, is_condition: bool) -> Iterator[_Limit]:
    for compared in compared_for_equality(node):
        yield from _limit(comparison, *compared)
    if not is_condition:
        yield from _limit(_condition_texts, node, node)


def _conditions_of_parts(node: ast.AST) -> dict[ast.AST, ast.expr]:
    """Return the conditions under which Python computes parts of an `and`, an `or` and an `if` within an expression."""
    match node:
        case ast.BoolOp(operator, [_, *others] as operands):
            before: list[ast.expr] = [ast.BoolOp(operator, operands[:number]) for number in range(1, len(operands))]
            if isinstance(operator, ast.Or):
                before = [ast.UnaryOp(ast.Not(), condition) for condition in before]
            return dict(zip(others, before, strict=True))
        case ast.IfExp(test, body, other):
            return {body: test, other: ast.UnaryOp(ast.Not(), test)}
    return {}


def _if_reached(condition: CodeType, limit: _Limit, frame: FrameType) -> list[Fact]:
    with suppress(Exception):  # as of the operands of a limit
        (is_reached,) = eval(condition, frame.f_globals, frame.f_locals)
        return limit(frame) if is_reached else []
    return []


def _limit(texts: Callable[..., Iterable[Fact | str]], node: ast.expr, *operands: ast.expr) -> Iterator[_Limit]:
    """Yield the limit of an expression if its operands can be computed again.

    Args:
        texts: function of the expression's text and the operands that yields facts, or the texts of branches.
    """
    code = _code(operands)
    if _ASKS_FOR_MEMORY.search(text := ast.unparse(node)) or code is None:
        return

    def of_frame(frame: FrameType) -> list[Fact]:
        with suppress(Exception):  # a name that the statement itself binds, or an operand of another kind
            facts = texts(text, *eval(code, frame.f_globals, frame.f_locals))
            return [fact if isinstance(fact, Fact) else Fact("branch", fact) for fact in facts]
        return []

    yield of_frame


def _code(operands: Sequence[ast.expr]) -> CodeType | None:
    """Compile a tuple of expressions; None if to compute them again may change something."""
    parts = [part for operand in operands for part in ast.walk(operand)]
    called = {ast.unparse(part.func).rpartition(".")[2] for part in parts if isinstance(part, ast.Call)}
    is_repeatable = called <= _CALLS and not any(isinstance(part, _UNREPEATED) for part in parts)
    return compile(f"({', '.join(map(ast.unparse, operands))},)", "<limit>", "eval") if is_repeatable else None
