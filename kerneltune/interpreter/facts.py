"""Name facts of launches in Triton's interpreter, collect them, and tell which facts of the largest cases no check has.

`kernel_code` reads facts from code and arguments; other facts are noted while a launch runs.
"""

import ast
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

from kerneltune.interpreter.faults import setting, statement

Kind = Literal[
    "launch", "call", "branch", "condition", "choice", "true", "false", "no iteration", "one iteration", "two iterations",
    "two programs",
    "tf32", "division", "last loaded", "last not loaded", "last stored", "last not stored", "not judged", "even blocks",
    "lossy cast", "equal", "equal at 1", "unequal", "same draw", "no barrier", "float", "on the CPU",
    "promise", "vector", "tf32 of indices", "no reference", "waits", "kept config", "taken config", "fake", "garbage", "copies",
    "no allocator",
]  # fmt: skip
_TEXTS: Mapping[str, str] = {
    "launch": "a launch of {text}",
    "call": "a call of {text}",
    "branch": "{text} in {where}",
    "condition": "{text} at {where}",
    "choice": "{text} at {where}",
    "two iterations": "two iterations of the loop at {where}",
    "two programs": "two programs of {text} along axis {where}",
    "tf32": "products of fp32 are rounded to tf32, {where}",
    "tf32 of indices": "products of fp32 that decide among integers are rounded to tf32, {where}: `input_precision='ieee'`?",
    "division": "`/` of fp32 is not exact on a GPU, {where}: tl.div_rn is",
    "kept config": "config {block} of the autotuner of {text}",
    "last not loaded": "loads no last element of {text} in {where}",
    "last not stored": "stores no last element of {text} in {where}",
    "not judged": "{text}",
    "even blocks": "{text}, {block}",
    "lossy cast": "integers that {text} does not hold at {where}",
    "same draw": "two programs draw the same random numbers, {where}: do their offsets lack the program?",
    "no barrier": "a program {text} at other places of a block, {where}: tl.debug_barrier() between?",
    "equal": "equal sizes above 1 at {text} in {where}",
    "promise": "{text} at {where} does not hold: wrong where it makes an access a vector",
    "vector": "a load is a vector of other elements than the program's, by {text}, {where}",
    "waits": "{text} waits for the GPU at {where}, so that no CUDA graph holds it: times need `policy='eager'`",
    "fake": "{where} of {text} differs between the operator and its register_fake: wrong under torch.compile",
    "no allocator": "a kernel makes a tensor descriptor, {where}, which fails on Hopper and later: triton.set_allocator?",
    "on the CPU": "{text} of {where} lies on the CPU, its other tensors on the GPU: is it made without `device=`?",
}
"""Texts of the kinds that users and tests see."""
ITERATIONS: Sequence[Kind] = ("no iteration", "one iteration", "two iterations")
_OF_CODE = ("launch", "call", "branch")
_SIZE_ABOVE = re.compile(r"^\S+(?=( - 1)? > \d+ beside )")
"""Size above a limit of values that a launch without memory does not know: T and x.shape[0] may be names of the same size."""


class Fact(NamedTuple):
    """Name something that launches have, or a place that they reach.

    | kind | fact | text | where |
    |---|---|---|---|
    | launch | a kernel is launched | kernel | |
    | call | a device function is called | function | |
    | branch | a branch on arguments, a flag, or sizes that are compared, such as `N > BLOCK` | text | kernel, function |
    | condition | an `if` whose side arguments do not tell | text | PATH:LINE |
    | choice | a minimum or maximum of two values that arguments do not tell | text | PATH:LINE |
    | true, false | the side that a condition takes; the second, the first operand of a choice | | PATH:LINE |
    | no, one, two iteration(s) | the iterations of a loop; `two` stands for two or more | | PATH:LINE |
    | two programs | two or more programs along an axis of the grid | kernel | axis |
    | tf32 | a product whose fp32 operands are rounded | | PATH:LINE |
    | tf32 of indices | such a product in a run all of whose outputs are integers of 16 bits or more | | PATH:LINE |
    | division | a `/` of fp32 whose results are rounded | | PATH:LINE |
    | last loaded, last not loaded | whether the programs that run load an argument's last element | argument | kernel |
    | last stored, last not stored | whether the programs that run store it | argument | kernel |
    | even blocks | several blocks of `block` elements, none of them ragged | text | |
    | lossy cast | integers that a cast to 8 or 16 bits changes | element type | PATH:LINE |
    | equal, equal at 1, unequal | how two sizes compare in `M == N`; at 1x1 all are equal | text | kernel, function |
    | same draw | two programs of a launch draw random numbers from the same seed and offsets | | PATH:LINE |
    | no barrier | a program stores and loads an element in different threads | `loads`, `stores` | PATH:LINE |
    | float | a kernel gets a float as an argument | number | |
    | promise | a promise about a tensor, other than of `max_contiguous`, that does not hold | promise | PATH:LINE |
    | vector | a load that a wrong promise makes a vector of other elements | promise | PATH:LINE |
    | on the CPU | a kernel gets a tensor of the CPU with elements beside tensors without memory | argument | kernel |
    | copies | host code copies values to tensors without memory, or asks which are not 0, and so waits for a GPU | | PATH:LINE |
    | waits | a variant, timed as a graph, calls a function of torch that waits for a GPU | variant | FILE:LINE |
    | garbage | a load without `other` leaves elements out by its mask | | PATH:LINE |
    | kept config | an autotuner with COUNT configs may choose the config with the number `block` | kernel | COUNT |
    | taken config | it takes this config | kernel | COUNT |
    | fake | the function of `register_fake` gives another output than its operator | operator | ATTRIBUTE of output NUMBER |
    | no allocator | a kernel makes a tensor descriptor, for which a GPU needs memory, and no allocator is set | | PATH:LINE |
    | no reference | a captured kernel's author gives no reference | kernel | |
    | not judged | launches without memory that were given up, and why | text | kernel if of one |
    """

    kind: Kind
    text: str
    where: str = ""
    block: int = 0

    def __str__(self) -> str:
        return _TEXTS[self.kind].format(text=self.text, where=os.path.basename(self.where), block=self.block)


_NOTED: ContextVar[set[Fact] | None] = ContextVar("noted", default=None)
WITHOUT_MEMORY: ContextVar[bool] = ContextVar("without_memory", default=False)
"""Set while a launch runs on tensors without memory: only its addresses count."""


@contextmanager
def noting(passes_on: bool = True) -> Iterator[set[Fact]]:
    """Collect the facts of the launches within; `passes_on`: whether an enclosing `noting` gets the facts as well."""
    facts = set[Fact]()
    try:
        with setting(_NOTED, facts):
            yield facts
    finally:
        if passes_on:
            note_facts(*facts)


def note_facts(*facts: Fact) -> None:
    """Note facts of a launch."""
    if (noted := _NOTED.get()) is not None:
        noted.update(facts)


def note_here(kind: Kind, text: str = "") -> str:
    """Note a fact whose place is the kernel's statement that runs; return the place."""
    file, line = statement()
    note_facts(Fact(kind, text, place := f"{file}:{line}"))
    return place


def noting_draws(philox: Callable[..., Any], is_drawn: Callable[[Sequence[Any]], bool]) -> Callable[..., Any]:
    """Return Triton's generator of random numbers, which notes if `is_drawn` says that another program has drawn the same."""

    def drawn(*state: Any, **named: Any) -> Any:
        if not WITHOUT_MEMORY.get() and is_drawn(state):  # without memory, all loaded seeds are 0
            note_here("same draw")
        return philox(*state, **named)

    return drawn


@functools.cache
def compared_for_equality(node: ast.AST) -> list[tuple[ast.expr, ast.expr, ast.expr]]:
    """Return each comparison of two expressions for equality within an expression, and the two: names, items or calls.

    Constants, and counts that are computed, such as `HELD == (N + 7) // 8`, are no sizes whose strides may be swapped.
    """
    found = list[tuple[ast.expr, ast.expr, ast.expr]]()
    sizes = ast.Name | ast.Attribute | ast.Subscript | ast.Call
    for part in ast.walk(node):
        match part:
            case ast.Compare(one, [ast.Eq() | ast.NotEq()], [other]) if isinstance(one, sizes) and isinstance(other, sizes):
                found.append((part, one, other))
    return found


def comparison(text: str, one: object, other: object) -> list[Fact]:
    """Return the fact of a comparison for equality, whose place is left empty; none unless two integers are compared."""
    if not type(one) is type(other) is int:
        return []
    return [Fact("unequal" if one != other else "equal" if one > 1 else "equal at 1", f"`{text}`")]


def unreached(checks: Set[Fact], largest: Set[Fact]) -> list[str]:
    """Return a text for each fact that checks should have and lack, then for each condition of which checks reach a single side.

    Of a launch or a call that no check has, no branch is named, and beside such a launch no call. Of several sizes above the
    limit of an expression, one size is named.
    """
    lacking = _due(checks, largest) - checks
    functions = {fact.text for fact in lacking if fact.kind in ("launch", "call")}
    lacking -= {fact for fact in lacking if fact.kind == "branch" and fact.where in functions}
    if any(fact.kind == "launch" for fact in lacking):
        lacking -= {fact for fact in lacking if fact.kind == "call"}
    by_limit = {fact._replace(text=_SIZE_ABOVE.sub("", fact.text)): fact for fact in sorted(lacking, reverse=True)}
    lines = [str(fact) for fact in sorted(by_limit.values(), key=lambda fact: (fact.kind in _OF_CODE, str(fact)))]
    for fact in sorted(fact for fact in largest if fact.kind in ("condition", "choice")):
        is_true, is_false = (Fact(side, "", fact.where) in checks for side in ("true", "false"))
        if is_true != is_false and fact.kind == "choice":
            lines.append(f"{fact} equal to its {'first' if is_true else 'second'} operand")
        elif is_true != is_false:
            lines.append(f"{fact} other than {'true' if is_true else 'false'}")
    return lines


def _due(checks: Set[Fact], largest: Set[Fact]) -> set[Fact]:
    """Return the facts that checks should have.

    - Two iterations of each loop, but for loops with a single iteration in the largest cases. A loop without an iteration there
      may have any number of iterations, because launches without memory load zeros.
    - The facts of the largest cases that tell of two programs, of lossy casts, of kept configs and of code.
    - Equal sizes above 1 where checks compare sizes that are both 1, if the sizes differ in another check, or are equal above 1
      in the largest cases.
    """
    due = {fact for fact in largest if fact.kind in ("two programs", "lossy cast", "kept config", *_OF_CODE)}
    for fact in checks | largest:
        once, twice = fact._replace(kind="one iteration"), fact._replace(kind="two iterations")
        if fact.kind in ITERATIONS and (twice in largest or once not in largest):
            due.add(twice)
    for fact in checks:
        equal, unequal = fact._replace(kind="equal"), fact._replace(kind="unequal")
        if fact.kind == "equal at 1" and (equal in largest or unequal in checks):
            due.add(equal)
    return due


def cut_short(checks: Set[Fact], largest: Set[Fact]) -> list[Fact]:
    """Return arguments whose last element is stored, or loaded, in all checks, and in no launch of the largest cases.

    Kernels with a launch that was not judged, for example for lack of time, are left out. So are loads of a kernel whose stores
    are cut short, as its loads are cut short, too.
    """
    unjudged = {fact.where for fact in largest if fact.kind == "not judged"}
    met, short = checks - largest, list[Fact]()
    kinds: list[tuple[Kind, Kind]] = [("last not stored", "last stored"), ("last not loaded", "last loaded")]
    for left_out, accessed in kinds:
        missed = [fact for fact in largest if fact.kind == left_out and fact not in checks]
        known = unjudged | {fact.where for fact in short}
        short += [fact for fact in missed if fact.where not in known and Fact(accessed, fact.text, fact.where) in met]
    return short
