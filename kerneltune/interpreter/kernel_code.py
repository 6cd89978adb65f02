"""Read facts that tell launches apart from the code of kernels and of their device functions, without running them.

A fact is a kernel, a flag, a branch on arguments, a size larger than a block, such as `N > BLOCK in _sum`, or than another size
that is compared with places of the block, or a count of tiles that the size of a group does not divide.
"""

import ast
import functools
import inspect
import itertools
import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kerneltune.interpreter.facts import Fact, compared_for_equality, comparison
from kerneltune.rounding import cdiv

_FUNCTIONS = {"cdiv": cdiv, "min": min, "max": max, "minimum": min, "maximum": max, "bool": bool}
"""Functions whose calls are computed; a value with any other call is unknown."""
_CHOICES, _OPERANDS = ("min", "max", "minimum", "maximum"), 2
_LARGEST = {"int8": 2**8 - 1, "uint8": 2**8 - 1, "int16": 2**16 - 1, "uint16": 2**16 - 1}
"""Numbers above which half of all places do not fit a small type."""
_LOOP = "for"
_INDICES = ("torch.int32", "torch.int64")
_CALLED = re.compile(r"([\w.\])]+)\(")
_OF_MODULE = re.compile(rf"\b[\w.]+\.({'|'.join(_FUNCTIONS)})\(")

_UNKNOWN = object()
_Block = tuple[str, int]
"""Expression and value of the size of a block."""


def bound_arguments(executor: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a launch by name, without options of the launch."""
    names = _parameters(executor.fn)
    return inspect.getcallargs(executor.fn, *args, **{name: value for name, value in kwargs.items() if name in names})


@functools.cache
def _parameters(function: Any) -> list[str]:
    return inspect.getfullargspec(function).args


def facts_of(executor: Any, bound: Mapping[str, Any]) -> frozenset[Fact]:
    """Return the facts of a launch with some arguments."""
    values = {name: ... if hasattr(value, "data_ptr") else getattr(value, "value", value) for name, value in bound.items()}
    typed = tuple((name, type(value), value) for name, value in values.items() if getattr(value, "__hash__", None))
    return _facts(executor.fn, typed)


def floats_of(bound: Mapping[str, Any]) -> list[Fact]:
    """Return a fact for each finite float among the arguments of a launch that runs."""
    floats = [value for value in bound.values() if isinstance(value, float)]
    return [Fact("float", repr(value)) for value in floats if math.isfinite(value)]


def integers_of(kernel: str, bound: Mapping[str, Any]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the largest number of each tensor of integers among the arguments of a launch, and how many numbers it holds.

    Without memory the largest number is 0.
    """
    tensors = {name: value for name, value in bound.items() if str(getattr(value, "dtype", "")) in _INDICES and value.numel()}
    return {(kernel, name): (0 if value.is_meta else int(value.max()), value.numel()) for name, value in tensors.items()}


def names_of(arguments: Iterable[tuple[str, Any]]) -> dict[int, str]:
    """Return the name of each argument by its identity, of a descriptor also by its tensor's."""
    return {id(value): name for name, argument in arguments for value in (argument, getattr(argument, "base", argument))}


def cpu_tensors_of(kernel: str, bound: Mapping[str, Any]) -> list[Fact]:
    """Return a fact for each tensor of the CPU among a launch's arguments, unless it is empty or pinned: a GPU takes these."""
    tensors = {name: getattr(value, "base", value) for name, value in bound.items() if hasattr(value, "data_ptr")}
    on_cpu = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta and tensor.numel()}
    return [Fact("on the CPU", name, kernel) for name, tensor in on_cpu.items() if not tensor.is_pinned()]


@functools.lru_cache(maxsize=1 << 14)
def _facts(kernel: Any, typed: tuple[tuple[str, type, Any], ...]) -> frozenset[Fact]:
    return frozenset(_Reading(kernel, {name: value for name, _type, value in typed}).read())


class _Reading:
    """Read the code of a function, and of device functions that it calls, and collect facts.

    Args:
        values: the parameters whose values are known.
        blocks: the blocks behind each parameter of a device function that holds places, such as `tl.arange(0, BLOCK)`. Conditions
            on a device function's constants follow from flags and knobs of the kernel, and are no facts.
    """

    def __init__(self, function: Any, values: Mapping[str, Any], blocks: Mapping[str, frozenset[_Block]] | None = None) -> None:
        self._tree = tree = _tree(function)
        self._values = values
        self._code = function.__code__
        self._name, self._blocks, self._is_kernel = function.__name__, dict(blocks or {}), blocks is None
        self.facts = {Fact("launch" if self._is_kernel else "call", self._name)}
        parameters = {arg.arg for arg in tree.args.args}
        names = {
            name: getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
            for name, value in function.__globals__.items()
            if name not in parameters
        }
        self._known = {**names, **_FUNCTIONS, **values}
        self._flags = {name for name, value in values.items() if isinstance(value, bool)}
        self._compared: dict[_Block, set[str]] = defaultdict(set)

    def read(self) -> set[Fact]:
        """Return the facts of the function and of the functions that it calls."""
        self._read(self._tree.body)
        constants = _constants(self._tree)
        self._note_flags(constants)
        self._note_divisions(constants)
        self._note_casts()
        self._note_comparisons(constants)
        return self.facts

    def _note_flags(self, constants: frozenset[str]) -> None:
        for flag in constants if self._is_kernel else ():
            if isinstance(self._values.get(flag), bool | str):
                self._note(f"{flag}={self._values[flag]}")

    def _note_divisions(self, constants: frozenset[str]) -> None:
        """Note counts that a constant does not divide, such as the tiles of the last group."""
        for count, divisor in _divisions(self._tree):
            tiles, of_group = self._known.get(count), self._known.get(divisor)
            if divisor in constants and type(tiles) is type(of_group) is int and tiles > of_group > 0 and tiles % of_group:
                self._note(f"{count} % {divisor} != 0")

    def _note_casts(self) -> None:
        """Note sizes that a small type of a cast does not hold."""
        for kind, name in itertools.product(_casts(self._tree), sorted(self._values.keys() - self._flags)):
            if type(self._values[name]) is int and self._values[name] > _LARGEST[kind]:
                self._note(f"{name} > {_LARGEST[kind]} beside a cast to {kind}")

    def _note_comparisons(self, constants: frozenset[str]) -> None:
        """Note which of two sizes is larger, if both are compared with places of a block."""
        values = self._values
        for compared in self._compared.values():
            for larger, smaller in itertools.permutations(compared & values.keys(), 2):
                if values[larger] > values[smaller] and not constants >= {larger, smaller}:
                    self._note(f"{larger} > {smaller}")

    def _note(self, text: str) -> None:
        self.facts.add(Fact("branch", text, self._name))

    def _place(self, node: ast.expr) -> str:
        return f"{self._code.co_filename}:{self._code.co_firstlineno + node.lineno - 1}"

    def _value(self, node: ast.AST) -> Any:
        """Return the value of an expression, or _UNKNOWN."""
        code = _code(node)
        try:
            return _UNKNOWN if code is None else eval(code, self._known)
        except Exception:  # an unknown name, or an operation on a tensor
            return _UNKNOWN

    def _read(self, statements: Sequence[ast.stmt]) -> bool:
        """Read statements in their order; return whether the function certainly returns among them."""
        return any(self._statement(node) for node in statements)

    def _statement(self, node: ast.stmt) -> bool:
        if isinstance(node, ast.If):
            is_true = self._decide(node.test)
            if is_true is not _UNKNOWN:
                return self._read(node.body if is_true else node.orelse)
            self.facts.add(Fact("condition", f"`if {_text(node.test)}`", self._place(node.test)))
            before = dict(self._known)
            returns_if_true, self._known = self._read(node.body), before
            returns_if_false = self._read(node.orelse)
            self._forget(node)
            return returns_if_true and returns_if_false
        if isinstance(node, ast.For | ast.While):
            self._expression(node.iter if isinstance(node, ast.For) else node.test)
            self._forget(node)
            self._read(node.body)
        else:
            self._expression(node)
        pairs: list[tuple[ast.expr, ast.expr]] = []
        match node:
            case ast.Assign([ast.Tuple(names), *_], ast.Tuple(parts)) if len(names) == len(parts):
                pairs = list(zip(names, parts, strict=True))
            case ast.Assign([target, *_], value) | ast.AnnAssign(target, _, ast.expr() as value):
                pairs = [(target, value)]
        values = [self._value(part) for _name, part in pairs]
        self._forget(node)
        for (name, part), of_name in zip(pairs, values, strict=True):
            if isinstance(name, ast.Name):
                if of_name is not _UNKNOWN:
                    self._known[name.id] = of_name
                if not isinstance(part, ast.Compare):
                    self._blocks[name.id] = self._blocks.get(name.id, frozenset()) | self._blocks_of(part)
        return isinstance(node, ast.Return)

    def _forget(self, node: ast.stmt) -> None:
        """Forget the values of the names that a statement assigns."""
        for name in _stored(node):
            self._known.pop(name, None)

    def _decide(self, test: ast.AST) -> Any:
        """Return the value of a condition, or _UNKNOWN; note it as a fact unless it is a flag."""
        value = self._value(test)
        for node, *compared in compared_for_equality(test):
            self.facts.update(fact._replace(where=self._name) for fact in comparison(_text(node), *map(self._value, compared)))
        if value is _UNKNOWN:
            self._expression(test)
            return value
        if self._is_kernel:
            is_fact = _text(test).removeprefix("not ") not in self._flags
        else:
            is_fact = bool(self._sizes_in(test) - _constants(self._tree))
        if is_fact:
            self._note(_text(test) if value else f"not ({_text(test)})")
        return value

    def _expression(self, node: ast.AST) -> None:
        """Note the facts of the conditions within an expression, and of the device functions that it calls."""
        if isinstance(node, ast.Call):
            (self._choose if _text(node.func).endswith(_CHOICES) else self._call)(node)
            if _text(node.func).endswith("where") and node.args and self._value(node.args[0]) is _UNKNOWN:
                # of conditions that are blocks, `unreached` names none
                self.facts.add(Fact("condition", f"`where {_text(node.args[0])}`", self._place(node)))
        if isinstance(node, ast.IfExp):
            is_true = self._decide(node.test)
            for side in (node.body, node.orelse) if is_true is _UNKNOWN else (node.body if is_true else node.orelse,):
                self._expression(side)
        elif isinstance(node, ast.Compare | ast.BoolOp) and isinstance(self._value(node), bool):
            self._decide(node)
        elif isinstance(node, ast.Compare):
            self._compare(node)
        else:
            for part in _telling(node):
                self._expression(part)

    def _compare(self, node: ast.Compare) -> None:
        """Note the sizes that are compared with places of a block."""
        for places, other in itertools.permutations((node.left, *node.comparators), 2):
            for block in self._blocks_of(places):
                for name in self._sizes_in(other) - {block[0]}:
                    self._compared[block].add(name)
                    if self._known[name] > block[1]:
                        self._note(f"{name} > {block[0]}")
                        if block[1] > 1 and self._known[name] % block[1] == 0:
                            self.facts.add(Fact("even blocks", f"{name} % {block[0]} == 0 in {self._name}", block=block[1]))

    def _sizes_in(self, node: ast.AST) -> set[str]:
        """Return the names of known integers in an expression."""
        return {name for name in _names(node) if type(self._known.get(name)) is int}

    def _blocks_of(self, node: ast.AST) -> frozenset[_Block]:
        """Return the blocks behind the places of an expression."""
        ends = [(_text(end), self._value(end)) for end in _ends(node)]
        named_blocks = (self._blocks.get(name, frozenset()) for name in _names(node))
        return frozenset(block for block in ends if type(block[1]) is int).union(*named_blocks)

    def _choose(self, node: ast.Call) -> None:
        """Note which operand is the minimum or the maximum, as of a branch."""
        value = self._value(node)
        is_reduction = _text(node.func).rpartition(".")[0] and not _text(node.func).endswith("imum")
        if value is _UNKNOWN and len(node.args) == _OPERANDS and not is_reduction:
            self.facts.add(Fact("choice", f"`{_text(node)}`", self._place(node)))
        taken = [operand for operand in node.args if type(value) is int and self._value(operand) == value]
        if len(taken) == 1:  # a limit that a size equals cuts nothing
            self._note(f"{_text(node)} = {_text(taken[0])}")

    def _call(self, node: ast.Call) -> None:
        """Read a device function with the arguments whose values are known."""
        function = getattr(self._value(node.func), "fn", None)
        if not inspect.isfunction(function) or function.__module__.startswith("triton."):
            return
        named = {word.arg: word.value for word in node.keywords if word.arg}
        try:
            arguments = inspect.signature(function).bind_partial(*node.args, **named).arguments
        except TypeError:  # a call that fails
            return
        arguments = {name: operand for name, operand in arguments.items() if isinstance(operand, ast.expr)}
        values = {name: value for name, operand in arguments.items() if (value := self._value(operand)) is not _UNKNOWN}
        self.facts |= _Reading(function, values, {name: self._blocks_of(operand) for name, operand in arguments.items()}).read()


@functools.cache
def _tree(function: Any) -> ast.FunctionDef:
    """Return the syntax tree of a function, without statements if its source is unknown."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except OSError:
        source = "def _(): ..."
    (tree,) = ast.parse(source).body
    return tree  # type: ignore[return-value]  # the source of a function


@functools.cache
def _constants(tree: ast.FunctionDef) -> frozenset[str]:
    """Return the parameters of a function that are `tl.constexpr`."""
    return frozenset(
        arg.arg for arg in (*tree.args.args, *tree.args.kwonlyargs) if arg.annotation and "constexpr" in _text(arg.annotation)
    )


@functools.cache
def _casts(tree: ast.FunctionDef) -> frozenset[str]:
    """Return the small types of integers that a function casts values to, which may be places or counts."""
    values, kinds = _values_by_name(tree), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(value, "to" | "cast"), [*_, kind], []) if not _is_small(value, values):
                kinds.add(_text(kind).rpartition(".")[2])
    return frozenset(kinds.intersection(_LARGEST))


def _values_by_name(tree: ast.FunctionDef) -> dict[str, list[ast.expr]]:
    """Return what is assigned to each name, and to `_LOOP` if there is a loop whose limits are no constants."""
    values = defaultdict[str, list[ast.expr]](list)
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Name(name)], value):
                values[name].append(value)
            case ast.AugAssign(ast.Name(name) as before, operator, value):
                values[name].append(ast.BinOp(before, operator, value))
            case ast.For(ast.Name(name), ast.Call(_, limits)) if all(isinstance(limit, ast.Constant) for limit in limits):
                values[name] += limits
            case ast.For() | ast.While():
                values[_LOOP].append(ast.Constant(None))
    return values


def _is_small(node: ast.expr, values: Mapping[str, list[ast.expr]], within: frozenset[str] = frozenset()) -> bool:
    """Return whether an expression certainly is no place and no count: a float, a constant, or made of these.

    within: names whose values hold the expression.
    """
    match node:
        case ast.Constant() | ast.Compare() | ast.BinOp(_, ast.Mod() | ast.BitAnd(), ast.Constant()):
            return True
        case ast.Name(name):
            if name in within:
                return _LOOP not in values
            assigned = values.get(name, [])
            return bool(assigned) and all(_is_small(value, values, within | {name}) for value in assigned)
        case ast.BinOp(left, _, right) | ast.Call(ast.Attribute(_, "where"), [_, left, right]):
            return _is_float(node) or (_is_small(left, values, within) and _is_small(right, values, within))
        case ast.Call(ast.Attribute(value, "to" | "cast"), _):
            return _is_float(node) or _is_small(value, values, within)
        case ast.Call(ast.Attribute(_, "zeros"), _):
            return True
    return _is_float(node)


def _is_float(node: ast.expr) -> bool:
    """Return whether an expression certainly is no integer: a sum, minimum or maximum with a float, or a quotient."""
    match node:
        case ast.Constant(value):
            return isinstance(value, float)
        case ast.BinOp(left, operator, right):
            return isinstance(operator, ast.Div) or _is_float(left) or _is_float(right)
        case ast.Call(ast.Attribute(_, "minimum" | "maximum"), [one, other, *_]):
            return _is_float(one) or _is_float(other)
        case ast.Call(ast.Attribute(_, "clamp" | "where"), [_, one, other, *_]):
            return _is_float(one) or _is_float(other)
        case ast.Call(ast.Attribute(_, "to"), [kind, *_]):
            return _text(kind).rpartition(".")[2] in ("float32", "float16", "bfloat16")
        case ast.Call(ast.Attribute(_, "floor" | "ceil" | "sqrt" | "exp" | "exp2" | "log2" | "div_rn" | "rand"), _):
            return True
    return False


_text = functools.cache(ast.unparse)


@functools.cache
def _code(node: ast.AST) -> Any:
    """Compile an expression; None if it calls another function than _FUNCTIONS."""
    text = _OF_MODULE.sub(r"\1(", _text(node))
    return compile(text, "<expression>", "eval") if _FUNCTIONS.keys() >= set(_CALLED.findall(text)) else None


@functools.cache
def _names(node: ast.AST) -> frozenset[str]:
    return frozenset(part.id for part in ast.walk(node) if isinstance(part, ast.Name))


@functools.cache
def _stored(node: ast.AST) -> frozenset[str]:
    """Return the names that a statement assigns."""
    return frozenset(part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))


@functools.cache
def _ends(node: ast.AST) -> tuple[ast.expr, ...]:
    """Return the ends of the ranges `tl.arange(0, END)` in an expression."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call) and _text(part.func).endswith("arange")]
    return tuple(call.args[-1] for call in calls if call.args)


@functools.cache
def _telling(node: ast.AST) -> tuple[ast.AST, ...]:
    """Return the parts of an expression or a statement that are, or hold, conditions and calls."""
    kinds = ast.Compare | ast.BoolOp | ast.IfExp | ast.Call
    return tuple(part for part in ast.iter_child_nodes(node) if isinstance(part, kinds) or _telling(part))


@functools.cache
def _divisions(tree: ast.FunctionDef) -> frozenset[tuple[str, str]]:
    """Return each name of a count of tiles, `cdiv(…)`, with each name in a divisor: groups of tiles may be ragged."""
    assigned = {_text(node.targets[0]): node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)}
    counts = [name for name, value in assigned.items() if "cdiv(" in _text(value)]
    divisors = [
        node.right for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod | ast.FloorDiv)
    ]
    divisors += [assigned[node.id] for node in divisors if isinstance(node, ast.Name) and node.id in assigned]
    return frozenset(itertools.product(counts, frozenset().union(*map(_names, divisors))))
