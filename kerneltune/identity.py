"""Digest the code of a function: its syntax tree and the trees of everything that it uses, without names, comments and types.

A digest stays the same when a comment, a docstring, an annotation, an error message or the layout changes. It also stays when a
function, a constant or a local variable gets another name, and when code moves to another module. It changes with every constant,
operation and attribute that the code uses. Triton's IR would do for kernels alone, but its text differs by Triton's version.

This module reads source files and runs none of them. A file that was edited after its module was imported is an error: its code
does not run.
"""

import ast
import bisect
import functools
import hashlib
import inspect
import itertools
import linecache
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from threading import Lock
from types import ModuleType
from typing import Any

from kerneltune.source_modules import (
    COMPILERS,
    SourceModule,
    bound_by,
    imports_of,
    is_installed,
    module_of,
    required_module,
    source_module,
    unwrapped,
    wrapped_by,
)

_DIGITS = 12
_DEPTH = 100_000
"""Frames that a digest may need: a chain of functions needs a dozen for each function."""
_DEEP = Lock()
"""Held while Python's limit of frames is `_DEPTH`."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_ENGINE = (
    "kerneltune.spec", "kerneltune.cache", "kerneltune.device", "kerneltune.errors", "kerneltune.misses",
    "kerneltune.kernel_lib.functions",
)  # fmt: skip
"""Modules that change neither the results nor the speed of a config: references to them are not followed."""
_METHODS = (ast.FunctionDef, ast.AsyncFunctionDef)
_FUNCTIONS = (*_METHODS, ast.Lambda)
_ELEMENT_TYPE = re.compile(r"(tl|triton\.language)\.(u?int|float|bfloat|pointer_type)\S*|'(const )?\*?(i|u|fp|bf)\d+\*?'")
"""Annotations of kernels that fix the element type of a parameter."""
_SKIPPED = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx"})


def code_digest(target: Any) -> str:
    """Return 12 hexadecimal digits that identify the code of a callable.

    Definitions of the callable's top-level package and of kerneltune count in full. So do, for a callable of another package,
    definitions of modules that are not installed: beside a plug-in, or in a package of its repository. Definitions of all other
    packages count by name.

    Args:
        target: a function, a Triton kernel, a class, an object that wraps a function, or a `functools.partial` of these.
    """
    return _digest_once(target) if inspect.isfunction(target) else _digest(target)  # equal objects of a class may run other code


def _digest(target: Any) -> str:
    innermost = unwrapped(target)
    owner = innermost if isinstance(innermost, type) or inspect.isfunction(innermost) else type(innermost)
    package = str(owner.__module__).partition(".")[0]
    writer = _Writer({"kerneltune", package} - COMPILERS, follows_uninstalled=package != "kerneltune")
    with _DEEP:
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, _DEPTH))
        try:
            writer.write_value(target)
        finally:
            sys.setrecursionlimit(limit)
    return writer.digest()


_digest_once = functools.cache(_digest)


@dataclass(frozen=True)
class _Scope:
    """Hold the names inside a definition.

    Attributes:
        local: numbers of the names that the definition or a function inside it binds, in the order of their first binding.
        hidden: numbered names that are not local to the definition: `global` names, and names such as `x` that only a function
            inside it binds (`def f(): def g(): x = 1`).
        imported: names that an import statement inside the definition binds: (module, attribute or "").
    """

    module: SourceModule
    local: Mapping[str, int] = field(default_factory=dict)
    imported: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()

    def binds(self, name: str) -> bool:
        """Return whether a name is local."""
        return name in self.local and name not in self.hidden


@dataclass(frozen=True)
class _Definition:
    """Hold a name that a module of the digested package binds; without a name, the module itself."""

    module: SourceModule
    name: str = ""


_Meaning = _Definition | str | None
"""Meaning of a name: a definition, the text of another package's name or of a builtin, or None for the engine."""


class _Writer:
    """Write a canonical text of definitions: a definition in full at its first use, its number at later uses."""

    def __init__(self, followed: set[str], *, follows_uninstalled: bool) -> None:
        """followed: top-level packages whose definitions are written; definitions of other packages are written by name."""
        self._followed = followed
        self._follows_uninstalled = follows_uninstalled
        self._parts: list[str] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._open: set[int] = set()

    def digest(self) -> str:
        return hashlib.sha256("\n".join(self._parts).encode()).hexdigest()[:_DIGITS]

    def write_value(self, value: Any) -> None:
        """Write a live object: the callable asked for, and what partials, methods, closures and objects hold."""
        if id(value) in self._open:
            self._parts.append("itself")
            return
        self._open.add(id(value))
        if isinstance(value, functools.partial):
            self._parts.append("partial")
            self._write_values((value.func, *value.args, *value.keywords.items()))
        elif isinstance(value, tuple | list | dict):
            self._parts.append(f"{'mapping' if isinstance(value, dict) else 'sequence'} {len(value)}")
            self._write_values(value.items() if isinstance(value, dict) else value)
        elif isinstance(value, set | frozenset):
            self._parts += [f"set {len(value)}", *sorted(map(self._text_alone, value))]
        elif inspect.ismethod(value):
            self._write_values((value.__func__, value.__self__))
        elif inspect.isfunction(value):
            self._write_values((value.__wrapped__,) if hasattr(value, "__wrapped__") else ())
            if not hasattr(value, "__wrapped__") or (self._is_followed(module_of(value)) and not _is_decorated(value)):
                self._write_function(value)
        elif inspect.isbuiltin(value):
            self._parts.append(f"{value.__module__}.{value.__qualname__}")
        elif isinstance(value, type):
            self._write_named(value.__module__, value.__qualname__)
        else:
            self._write_instance(value)
        self._open.remove(id(value))

    def _text_alone(self, value: Any) -> str:
        """Return the text of an item of a set: each definition in full, so that the order of the items does not matter."""
        writer = _Writer(self._followed, follows_uninstalled=self._follows_uninstalled)
        writer._open = self._open
        writer.write_value(value)
        return "\n".join(writer._parts)

    def _write_values(self, values: Iterable[Any]) -> None:
        for value in values:
            self.write_value(value)

    def _write_instance(self, value: Any) -> None:
        """Write the function in a wrapper, class and constants of an object, else the value itself."""
        kind, wrapped = type(value), wrapped_by(value)
        is_constant = isinstance(value, Enum | ModuleType | bool | int | float | str)
        is_own = is_dataclass(value) or (self._is_followed(kind.__module__) and not is_constant)
        self._write_values(() if wrapped is None else (wrapped,))
        if is_own or (wrapped is None and callable(value) and not is_constant):
            self._write_named(kind.__module__, kind.__qualname__)
            self._write_values(self._constants_of(value) if is_own else ())
        elif wrapped is None:
            self._parts.append(value.__name__ if isinstance(value, ModuleType) else _ADDRESS.sub("", repr(value)))

    def _constants_of(self, value: Any) -> list[Any]:
        """Return the fields of a dataclass, or the functions and constants that another object holds, without its state.

        State are lists and other values that may be filled later, and attributes that calls change.
        """
        state = _changed_by_calls(kind for kind in type(value).__mro__ if self._is_followed(kind.__module__))
        if is_dataclass(value):
            return [getattr(value, item.name) for item in fields(value) if item.name not in state]
        attributes = [(name, item) for name, item in getattr(value, "__dict__", {}).items() if name not in state]
        return [(name, item) for name, item in attributes if callable(item) or isinstance(item, Enum | bool | int | float | str)]

    def _write_function(self, function: Any) -> None:
        outer, nested, _ = function.__code__.co_qualname.partition(".<locals>")
        file, module = function.__code__.co_filename, source_module(module_of(function))
        made = linecache.getlines(file) if file.startswith("<") else []
        if made and module is not None:  # a module has written the source, and given it to inspect
            self.write_node(ast.parse("".join(made)), _Scope(module))
        elif "<lambda>" in outer:
            self._write_lambda(function)
        else:
            self._write_named(module_of(function), outer)
        if nested:
            self._parts.append(f"nested {_number_of(function)}")
            self._write_values(cell.cell_contents for cell in function.__closure__ or ())

    def _write_lambda(self, function: Any) -> None:
        module = required_module(module_of(function))
        line = function.__code__.co_firstlineno
        lambdas = [n for n in ast.walk(module.tree) if isinstance(n, ast.Lambda) and n.lineno == line]
        if not lambdas:
            raise ValueError(f"{module.name}: no lambda at line {line}: edited after it was imported: start a new process")
        for node in lambdas:
            self.write_node(node, _Scope(module))

    def _write_named(self, module_name: str, qualname: str) -> None:
        if not self._is_followed(module_name):
            self._parts.append(f"{module_name}.{qualname}")
            return
        self._write_definition(_Definition(required_module(module_name), qualname.partition(".")[0]))

    def _write_definition(self, definition: _Definition) -> None:
        """Write the statements that bind a name at the top of a module."""
        key = definition.module.name, definition.name
        if key in self._numbers:
            self._parts.append(f"#{self._numbers[key]}")
            return
        self._numbers[key] = len(self._numbers)
        for statement in definition.module.bound.get(definition.name, ()):
            if isinstance(statement, ast.Assign | ast.AnnAssign) and self._calls_engine(statement.value, definition.module):
                self._parts.append("engine")
            else:
                self.write_node(statement, _Scope(definition.module), definition.name)

    def write_node(self, node: ast.AST, scope: _Scope, bound_name: str = "") -> None:
        """Write a tree; `bound_name` is the name that a top-level statement is asked for."""
        match node:
            case ast.Expr(value=ast.Constant(value=str())) | ast.Import() | ast.ImportFrom() | ast.Pass():
                return
            case ast.Raise():
                self._parts.append("raise")
            case ast.Assert(test=test):
                self._parts.append("assert")
                self.write_node(test, scope)
            case ast.Name(id=name):
                self._write_name(name, scope, bound_name)
            case ast.Attribute():
                self._write_attribute(node, scope)
            case ast.Constant(value=value):
                self._parts.append(f"{type(value).__name__} {value!r}")
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() | ast.ClassDef() | ast.ExceptHandler(name=str()):
                self._write_binding(node, scope)
            case ast.arg() | ast.AnnAssign():
                self._write_annotated(node, scope, bound_name)
            case _:
                self._parts.append(type(node).__name__)
                self._write_fields(node, scope, bound_name=bound_name)

    def _write_binding(self, node: ast.AST, scope: _Scope) -> None:
        """Write a function, class or handler without the name that it binds."""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                self._parts.append(type(node).__name__)
                scope = _inside(node, scope)
            case ast.ExceptHandler(name=str(name)):
                self._parts.append(f"as {scope.local.get(name, name)}")
            case _:
                self._parts.append(type(node).__name__)
        self._write_fields(node, scope, without=("name",))

    def _write_annotated(self, node: ast.arg | ast.AnnAssign, scope: _Scope, bound_name: str) -> None:
        """Write a parameter or an annotated assignment without its annotation, except what Triton reads."""
        match node:
            case ast.arg(arg=name, annotation=annotation):
                text = ast.unparse(annotation) if annotation is not None else ""
                kind = f" {text}" if _ELEMENT_TYPE.fullmatch(text) else ""
                if text.endswith("constexpr"):
                    kind = " constexpr"
                self._parts.append(f"parameter {scope.local.get(name, name)}{kind}")
            case ast.AnnAssign(target=target, value=value) if value is not None or isinstance(target, ast.Name):
                self.write_node(ast.Assign([target], value if value is not None else ast.Constant(None)), scope, bound_name)

    def _write_fields(self, node: ast.AST, scope: _Scope, without: tuple[str, ...] = (), bound_name: str = "") -> None:
        for name, value in ast.iter_fields(node):
            if name in _SKIPPED or name in without or value is None or value == []:
                continue
            if isinstance(value, ast.AST):
                self._parts += [name] if isinstance(node, ast.Slice | ast.arguments) else []  # any part of these may be missing
                self.write_node(value, scope, bound_name)
            elif isinstance(value, list):
                self._parts.append(f"{name} (")
                for item in value:
                    if isinstance(node, ast.JoinedStr) and isinstance(item, ast.Constant) and item.value == "":
                        continue  # Python 3.12 alone writes empty texts into nested format specifications
                    if isinstance(item, ast.AST):
                        self.write_node(item, scope, bound_name)
                    else:
                        self._parts.append(str(scope.local.get(item, item)))
                self._parts.append(")")
            else:
                self._parts.append(f"{name} {value}")

    def _write_name(self, name: str, scope: _Scope, bound_name: str) -> None:
        if scope.binds(name):
            self._parts.append(f"local {scope.local[name]}")
        elif name == bound_name:
            self._parts.append("itself")
        else:
            self._write_reference(self._resolve(name, scope))

    def _write_attribute(self, node: ast.Attribute, scope: _Scope) -> None:
        """Write `a.b.c`: its definition if `a` is a followed module, its name if `a` is a module of another package."""
        names = [node.attr]
        base = node.value
        while isinstance(base, ast.Attribute):
            names.append(base.attr)
            base = base.value
        if not isinstance(base, ast.Name) or scope.binds(base.id):
            self.write_node(node.value, scope)
            self._parts.append(f".{node.attr}")
            return
        meaning = self._resolve(base.id, scope)
        while names and isinstance(meaning, _Definition) and not meaning.name:
            meaning = self._resolve_member(meaning.module, names.pop())
        self._write_reference(meaning)
        self._parts += [f".{name}" for name in reversed(names)] if meaning is not None else []

    def _write_reference(self, meaning: _Meaning) -> None:
        """Write what `_resolve` returned."""
        if isinstance(meaning, _Definition):
            self._write_definition(meaning)
        else:
            self._parts.append("engine" if meaning is None else meaning)

    def _is_followed(self, name: str) -> bool:
        top = name.partition(".")[0]
        return name not in _ENGINE and (top in self._followed or (self._follows_uninstalled and not is_installed(top)))

    def _resolve(self, name: str, scope: _Scope) -> _Meaning:
        """Return the meaning of a name that is not local."""
        if name in scope.imported:
            return self._resolve_import(*scope.imported[name])
        if name in scope.module.bound:
            return self._resolve_member(scope.module, name)
        for statement in scope.module.bound.get("*", ()):
            for _, source, _ in imports_of(statement, scope.module.package):
                module = source_module(source) if self._is_followed(source) else None
                if module is not None and name in module.bound:
                    return self._resolve_member(module, name)
        return f"builtin {name}"

    def _resolve_member(self, module: SourceModule, name: str) -> _Meaning:
        """Return the meaning of `name` in a module."""
        statements = module.bound.get(name, ())
        for statement in statements:
            for bound, source, attribute in imports_of(statement, module.package):
                if bound == name:
                    return self._resolve_import(source, attribute)
        submodule = None if statements else source_module(f"{module.name}.{name}")
        return _Definition(module, name) if submodule is None else _Definition(submodule)

    def _resolve_import(self, source: str, attribute: str) -> _Meaning:
        """Return the meaning of the name that `import source` or `from source import attribute` binds."""
        full = f"{source}.{attribute}" if attribute else source
        if source in _ENGINE or full in _ENGINE:
            return None
        if not self._is_followed(source):
            return full
        submodule = source_module(full)
        if submodule is not None:
            return _Definition(submodule)
        module = source_module(source)
        return full if module is None else self._resolve_member(module, attribute)

    def _calls_engine(self, value: ast.expr | None, module: SourceModule) -> bool:
        """Return whether the engine makes an assigned value: a look-up of configs is no part of a config's code."""
        if not isinstance(value, ast.Call):
            return False
        base = value.func
        while isinstance(base, ast.Attribute):
            base = base.value
        return isinstance(base, ast.Name) and self._resolve(base.id, _Scope(module)) is None


def _is_decorated(wrapper: Any) -> bool:
    """Return whether a decorator made a wrapper, so that the definition of the wrapped function holds the decorator."""
    module, name = source_module(wrapper.__module__), wrapper.__qualname__.partition(".")[0]
    statements = module.bound.get(name, ()) if module is not None else ()
    return any(not isinstance(statement, _METHODS) or statement.decorator_list for statement in statements)


def _methods_of(kind: type) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the methods that the body of a class defines."""
    module = source_module(kind.__module__)
    for statement in module.bound.get(kind.__qualname__.partition(".")[0], ()) if module is not None else ():
        for node in ast.walk(statement):
            if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                yield from (method for method in node.body if isinstance(method, _METHODS) and method.args.args)


def _changed_by_calls(classes: Iterable[type]) -> set[str]:
    """Return the attributes that calls change of an object of these classes: a count of its calls, a function made at the first.

    Calls change an attribute if `__call__` or a method that it reaches sets the attribute, or if any method but `__init__` has
    `+=` or the like for it. An attribute that another method sets before all calls, such as `configure`, is a constant.
    """
    used, stored, changed = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set), set[str]()
    for method in itertools.chain.from_iterable(map(_methods_of, classes)):
        for node in ast.walk(method):
            match node:
                case ast.AugAssign(target=ast.Attribute(value=ast.Name(id=owner), attr=attribute)) if method.name != "__init__":
                    changed |= {attribute} if owner == method.args.args[0].arg else set()
                case ast.Attribute(value=ast.Name(id=owner), attr=attribute) if owner == method.args.args[0].arg:
                    (used if isinstance(node.ctx, ast.Load) else stored)[method.name].add(attribute)
    reached = ["__call__"]
    for name in reached:  # which grows
        changed |= stored[name]
        reached += used[name] - set(reached)
    return changed


def _number_of(function: Any) -> int:
    """Return the number of a nested function among the functions of its module's top-level definition, by line."""
    line = function.__code__.co_firstlineno
    for statement in required_module(module_of(function)).tree.body:
        if statement.lineno <= line <= (statement.end_lineno or 0):
            lines = {_first_line(node) for node in ast.walk(statement) if isinstance(node, _FUNCTIONS)}
            return bisect.bisect_left(sorted(lines), line)
    return 0


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> int:
    """Return the line of the first decorator of a function, else of the function."""
    decorators: list[ast.expr] = getattr(function, "decorator_list", [])
    return min(node.lineno for node in (function, *decorators))


def _inside(node: ast.AST, outer: _Scope) -> _Scope:
    """Return the scope of a function: its parameters and all names that it or a function inside it binds."""
    names: dict[str, int] = dict(outer.local)
    imported = dict(outer.imported)
    for child in ast.walk(node):
        for name in bound_by(child):
            names.setdefault(name, len(names))
        for name, source, attribute in imports_of(child, outer.module.package):
            imported[name] = (source, attribute)
    inner = {name for child in (node, *_within(node)) for name in bound_by(child)}
    hidden = {name for name in names if name not in inner and not outer.binds(name)}
    hidden |= {name for child in _within(node) if isinstance(child, ast.Global) for name in child.names}
    return _Scope(outer.module, {name: n for name, n in names.items() if name not in imported}, imported, frozenset(hidden))


def _within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes inside a function, without the nodes inside functions inside it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, _FUNCTIONS):
            yield from _within(child)
