"""Read the source files of modules: which top-level statements bind which names, and that the code in memory is of the file."""

import ast
import functools
import importlib.util
import inspect
import itertools
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_STARTED = time.time()
COMPILERS = frozenset({"torch", "triton"})
"""Packages that are never followed, wherever they lie: records name their versions."""
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib")).resolve()
_WRAPPED = ("__wrapped__", "__func__", "fn", "func", "_init_fn")
"""Attributes in which bound methods and decorators of functools, triton and torch keep the function that they wrap."""


@dataclass(frozen=True, eq=False)
class SourceModule:
    """Hold a source file.

    Attributes:
        package: the package that relative imports start from.
        bound: name -> the top-level statements that bind the name.
    """

    name: str
    package: str
    tree: ast.Module
    bound: Mapping[str, tuple[ast.stmt, ...]]


def module_of(function: Any) -> str:
    """Return the module of a function's code, also of a wrapper to which functools.wraps gave another name."""
    return str(function.__globals__.get("__name__", function.__module__))


def bound_by(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node of a tree binds itself."""
    match node:
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.ExceptHandler(name=str(name)):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case _:
            pass


def imports_of(node: ast.AST, package: str) -> Iterator[tuple[str, str, str]]:
    """Yield (bound name, module, attribute or "") of an import statement, also of imports inside a top-level `if` or `try`."""
    for statement in ast.walk(node) if isinstance(node, ast.If | ast.Try) else (node,):
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                top = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or top, top, ""
        elif isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                yield alias.asname or alias.name, _imported_from(statement, package), alias.name


def _imported_from(node: ast.ImportFrom, package: str) -> str:
    """Return the module of `from … import …`, also of a relative import."""
    if not node.level:
        return node.module or ""
    above = package.split(".")
    above = above[: len(above) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def unwrapped(target: Any) -> Any:
    """Return the function that a callable wraps, else the innermost object."""
    while not inspect.isfunction(target):
        wrapped = wrapped_by(target)
        if wrapped is None:
            return target
        target = wrapped
    return target


def wrapped_by(target: Any) -> Any:
    """Return the callable that an object wraps; None if it wraps none."""
    return next((getattr(target, name) for name in _WRAPPED if callable(getattr(target, name, None))), None)


@functools.cache
def is_installed(package: str) -> bool:
    """Return whether a top-level package is of site-packages or the standard library, is built in, or cannot be found."""
    if package in COMPILERS or package in sys.builtin_module_names:
        return True
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a script that is run
        spec = None
    files = [getattr(sys.modules.get(package), "__file__", None)]
    if spec is not None:
        files = [spec.origin, *(spec.submodule_search_locations or ())]
    paths = [Path(file).resolve() for file in files if file and file != "frozen"]
    standard = (_STANDARD_LIBRARY in path.parents for path in paths)
    return not paths or any(standard) or any({"site-packages", "dist-packages"} & set(path.parts) for path in paths)


def required_module(name: str) -> SourceModule:
    """Return the source of a module; raise ValueError if it has none."""
    module = source_module(name)
    if module is None:
        raise ValueError(f"module {name!r}: no source file")
    return module


@functools.cache
def source_module(name: str) -> SourceModule | None:
    """Return the source of a module, empty for a namespace package; None if it has no Python file.

    Raises:
        ValueError: a function was edited after the module was imported.
    """
    file, package = _source_of(name)
    if file is None and package:
        return SourceModule(name, package, ast.Module([], []), {})
    if file is None or file.suffix != ".py":
        return None
    source = file.read_bytes()
    if name in sys.modules and file.stat().st_mtime > _STARTED:
        _require_loaded(sys.modules[name], source, file)
    tree = ast.parse(source)
    bound: dict[str, tuple[ast.stmt, ...]] = {}
    for statement in tree.body:
        if isinstance(statement, ast.If) and not statement.orelse and ast.unparse(statement.test).endswith("TYPE_CHECKING"):
            continue  # it never runs; vLLM declares 300 settings in it
        for bound_name in dict.fromkeys(_binds(statement, package)):
            bound[bound_name] = (*bound.get(bound_name, ()), statement)
    return SourceModule(name, package, tree, bound)


def _require_loaded(module: ModuleType, source: bytes, file: Path) -> None:
    """Raise ValueError where a function of a module was loaded from another source than its file has now."""
    now: dict[str, list[str]] = {}  # a file may define several functions with the same name
    for code in _codes(compile(source, file, "exec", dont_inherit=True)):
        now.setdefault(code.co_qualname, []).append(code_text(code))
    classes = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    for value in itertools.chain(vars(module).values(), *(vars(kind).values() for kind in classes)):
        try:
            function = unwrapped(value)
        except Exception:  # an object of another package may do anything when it is asked for an attribute
            continue
        is_own = inspect.isfunction(function) and module_of(function) == module.__name__
        is_own = is_own and not function.__code__.co_filename.startswith("<")  # such as __init__ of a dataclass
        if is_own and code_text(function.__code__) not in now.get(function.__code__.co_qualname, ()):
            raise ValueError(f"{file}: {function.__qualname__}: edited after it was imported: start a new process")


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and all inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def code_text(value: Any, *without: str | None) -> str:
    """Return a text of bytecode, or of a constant of it, that is the same in every process; without: constants left out."""
    if isinstance(value, frozenset):  # strings have another order in each process
        return f"frozenset({{{', '.join(sorted(map(code_text, value)))}}})"
    if not isinstance(value, CodeType):
        return repr(value)
    constants = ", ".join(code_text(constant, None) for constant in value.co_consts if constant not in without)
    return f"({value.co_code!r}, [{constants}], {value.co_names!r}, {value.co_varnames!r})"


def _source_of(name: str) -> tuple[Path | None, str]:
    """Return the file of a module, None for a namespace package, and the package that its relative imports start from."""
    try:
        spec = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):  # a name inside a module that is no package; a script that is run
        file = getattr(sys.modules.get(name), "__file__", None)
        return (Path(file) if file else None), ""
    if spec is None:
        return None, ""
    if spec.origin is None:
        return None, spec.name if spec.submodule_search_locations is not None else ""
    return Path(spec.origin), spec.name if spec.submodule_search_locations is not None else spec.name.rpartition(".")[0]


def _binds(statement: ast.stmt, package: str) -> Iterator[str]:
    """Yield the names that a top-level statement binds, or whose items or attributes it sets; of a definition its own name."""
    is_definition = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    for node in (statement,) if is_definition else ast.walk(statement):
        yield from bound_by(node)
        if (
            isinstance(node, ast.Attribute | ast.Subscript)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
        ):
            yield node.value.id
        yield from (name for name, _, _ in imports_of(node, package))
