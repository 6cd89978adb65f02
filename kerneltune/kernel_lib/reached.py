"""Note how far launches in Triton's interpreter go: turns of loops, programs along the axes of a grid, products in tf32, facts.

A fact tells launches apart without running them: a kernel, a flag, a branch on arguments, a size larger than a block, such as
`N > BLOCK in _sum`, or a count of tiles that the size of a group does not divide. Facts come from a kernel's own code, not from
its device functions.
"""

import ast
import functools
import inspect
import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kerneltune.kernel_lib.faults import statement
from kerneltune.rounding import cdiv

Reached = dict[str, int]
"""Name of a loop or of an axis -> the most turns or programs of all launches; a fact, or a product in tf32 -> 1."""
_LOOP, _PROGRAMS, _TF32 = "turns of the loop at ", "programs of ", "tf32 at "
_FUNCTIONS = {"cdiv": cdiv, "min": min, "max": max, "bool": bool}
"""Functions whose calls are computed; a value with any other call is unknown."""
_CALLED = re.compile(r"([\w.\])]+)\(")
_OF_MODULE = re.compile(rf"\b[\w.]+\.({'|'.join(_FUNCTIONS)})\(")

_REACHED: ContextVar[Reached | None] = ContextVar("reached", default=None)


@dataclass(slots=True)
class Launches:
    """Hold the facts of some launches, and the number of their programs."""

    facts: set[str] = field(default_factory=set)
    num_programs: int = 0


@contextmanager
def noting() -> Iterator[Reached]:
    """Collect the notes of the launches within; an enclosing `noting` gets them as well."""
    reached: Reached = {}
    token = _REACHED.set(reached)
    try:
        yield reached
    finally:
        _REACHED.reset(token)
        for name, count in reached.items():
            _note(name, count)


def _note(name: str, count: int) -> None:
    if (reached := _REACHED.get()) is not None:
        reached[name] = max(count, reached.get(name, 0))


def note_loop(num_turns: int) -> None:
    """Note the turns of the loop that begins."""
    file, line = statement()
    _note(f"{_LOOP}{Path(file).name}:{line}", num_turns)


def note_grid(kernel: str, sizes: tuple[int, ...]) -> None:
    """Note the programs of a launch along each axis."""
    for axis, size in enumerate(sizes):
        _note(f"{_PROGRAMS}{kernel} along axis {axis}", size)


def note_facts(facts: set[str] | frozenset[str]) -> None:
    """Note facts of launches."""
    for fact in facts:
        _note(fact, 1)


def note_tf32(line: str) -> None:
    """Note the FILE:LINE of a product whose fp32 operands are rounded to tf32."""
    _note(f"{_TF32}{line}", 1)


def tf32_lines(reached: Reached) -> list[str]:
    """Return the FILE:LINE of products whose fp32 operands were rounded to tf32."""
    return sorted(name.removeprefix(_TF32) for name in reached if name.startswith(_TF32))


def merged(parts: list[Reached]) -> Reached:
    """Return the most of each loop and each axis."""
    return {name: max(part.get(name, 0) for part in parts) for name in dict.fromkeys(name for part in parts for name in part)}


def unreached(checks: list[Reached], bench: list[Reached]) -> list[str]:
    """Return loops that no check turns twice, axes that have two programs in no check, and facts of bench cases alone.

    A loop with a single turn and an axis with a single program in the largest cases are left out. Because launches without
    memory load zeros, a loop without a turn there has an unknown number of turns.
    """
    most, beyond = merged(checks), merged(bench)
    counted = {name: name.startswith((_LOOP, _PROGRAMS)) for name in merged([most, beyond])}
    few = [name for name in counted if most.get(name, 0) < 1 + counted[name] and not name.startswith(_TF32)]
    few = [name for name in few if beyond.get(name, 0) > counted[name] or (name.startswith(_LOOP) and not beyond.get(name))]
    return [f"two {name}" if counted[name] else name for name in few]


@contextmanager
def unlaunched() -> Iterator[Launches]:
    """Collect the facts of launches of interpreted kernels, and run no program."""
    from triton.runtime.interpreter import GridExecutor

    launches, call = Launches(), GridExecutor.__call__

    def collect(executor: Any, *args: Any, **kwargs: Any) -> None:
        bound = bound_arguments(executor, args, kwargs)
        grid = executor.grid(bound) if callable(executor.grid) else executor.grid
        launches.num_programs += math.prod(map(int, grid))
        launches.facts |= facts_of(executor, bound)

    GridExecutor.__call__ = collect
    try:
        yield launches
    finally:
        GridExecutor.__call__ = call


def bound_arguments(executor: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a launch by name, without options of the launch."""
    names = inspect.getfullargspec(executor.fn).args
    return inspect.getcallargs(executor.fn, *args, **{name: value for name, value in kwargs.items() if name in names})


def facts_of(executor: Any, bound: Mapping[str, Any]) -> frozenset[str]:
    """Return the facts of a launch with some arguments."""
    values = {name: ... if hasattr(value, "data_ptr") else getattr(value, "value", value) for name, value in bound.items()}
    known = tuple((name, type(value), value) for name, value in values.items() if getattr(value, "__hash__", None))
    return _facts(executor.fn, frozenset(executor.constexprs), known)


@functools.lru_cache(maxsize=1 << 14)
def _facts(kernel: Any, constexprs: frozenset[str], typed: tuple[tuple[str, type, Any], ...]) -> frozenset[str]:
    values, tree = {name: value for name, _type, value in typed}, _tree(kernel)
    found = [f"{flag}={value}" for flag, value in values.items() if flag in constexprs and isinstance(value, bool | str)]
    known = _known(tree, values, kernel.__globals__)
    for test in (ast.unparse(node.test) for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp)):
        is_flag = isinstance(values.get(test.removeprefix("not ")), bool)
        if not is_flag and (is_true := _value(f"bool({test})", known)) is not None:
            found.append(test if is_true else f"not ({test})")
    for left, right in _divisions(tree):
        if right in constexprs and _value(f"{left} > {right} and {left} % {right} != 0", known) is True:
            found.append(f"{left} % {right} != 0")
    whole = {name for name, value in values.items() if type(value) is int}
    for size, block in _masks(tree):
        if size in whole and block in whole & constexprs and values[size] > values[block]:
            found.append(f"{size} > {block}")
    return frozenset([f"a launch of {kernel.__name__}", *(f"{fact} in {kernel.__name__}" for fact in found)])


@functools.cache
def _tree(kernel: Any) -> ast.FunctionDef:
    """Return the syntax tree of a kernel, without statements if its source is unknown."""
    try:
        source = textwrap.dedent(inspect.getsource(kernel))
    except OSError:
        source = "def _(): ..."
    (tree,) = ast.parse(source).body
    return tree  # type: ignore[return-value]  # the source of a function


def _known(tree: ast.FunctionDef, values: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a kernel's arguments, and of names that are assigned once, outside of branches and loops."""
    stored = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    known = {name: value for name, value in {**names, **values, **_FUNCTIONS}.items() if name not in stored}
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Name) and stored[target.id] == 1:
            known[target.id] = _value(ast.unparse(node.value), known)
    return {name: value for name, value in known.items() if name not in stored or value is not None}


def _value(text: str, known: dict[str, Any]) -> Any:
    """Return the value of an expression; None if it is unknown."""
    text = _OF_MODULE.sub(r"\1(", text)
    try:
        return eval(text, known) if _FUNCTIONS.keys() >= set(_CALLED.findall(text)) else None
    except Exception:  # an unknown name, or an operation on a tensor
        return None


@functools.cache
def _divisions(tree: ast.FunctionDef) -> frozenset[tuple[str, str]]:
    """Return each name of a count of tiles, `cdiv(…)`, with each name in a divisor: groups of tiles may be ragged."""
    assigned = {ast.unparse(node.targets[0]): node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)}
    counts = [name for name, value in assigned.items() if "cdiv(" in ast.unparse(value)]
    divisors = [
        node.right for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.FloorDiv)
    ]
    divisors += [assigned[node.id] for node in divisors if isinstance(node, ast.Name) and node.id in assigned]
    names = {name.id for node in divisors for name in ast.walk(node) if isinstance(name, ast.Name)}
    return frozenset(itertools.product(counts, names))


@functools.cache
def _masks(tree: ast.FunctionDef) -> frozenset[tuple[str, str]]:
    """Return each name that the kernel compares with places of a block, and the name of the block's size.

    Places are `tl.arange(0, BLOCK)`, and names whose value contains it.
    """
    blocks: dict[str, set[str]] = {}

    def blocks_of(node: ast.AST) -> set[str]:
        calls = [part for part in ast.walk(node) if isinstance(part, ast.Call) and ast.unparse(part.func).endswith("arange")]
        found = {call.args[-1].id for call in calls if isinstance(call.args[-1], ast.Name)}
        return found.union(*(blocks.get(part.id, ()) for part in ast.walk(node) if isinstance(part, ast.Name)))

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and not isinstance(node.value, ast.Compare):
            blocks.setdefault(node.targets[0].id, set()).update(blocks_of(node.value))
    masks = [(node.left, *node.comparators) for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    return frozenset(
        (size.id, block)
        for sides in masks for places in sides for block in blocks_of(places)
        for other in sides if other is not places for size in ast.walk(other) if isinstance(size, ast.Name)
    )  # fmt: skip
