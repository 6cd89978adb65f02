"""Find a captured kernel again: import its module, or load its definition from the file that the program was started with.

The kernel's module is imported, so that hooks and heuristics are the author's. Of the program's file only the statements that a
kernel needs are executed: its definition, the definitions of the names in its decorators and body, and so on. A script without
`if __name__ == "__main__"` would otherwise train a model in order to be imported.
"""

import ast
import dis
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeGuard

from kerneltune.adopt.configs import OPTIONS, configs_digest, plain_tuner
from kerneltune.adopt.folder import LaunchClass
from kerneltune.adopt.kernels import KernelName, attribute, autotuner_of, bytecode_digest, jit_of, read_globals, source_digest
from kerneltune.adopt.program import describe_error, is_interpreted, python_version


class ReplayError(ValueError):
    """A class that cannot be replayed here; one line that says why."""


def live_kernel(captured: LaunchClass) -> Any:
    """Import a captured kernel's module and return its autotuner."""
    home, name = captured.home or captured.kernel, captured.kernel.text
    file = captured.home_file or captured.file
    held = vars(_module(home, file, captured.argv, captured.path))
    unwrap = jit_of if captured.is_plain else autotuner_of
    tuners = [found for found in map(unwrap, [attribute(held, home.name), *held.values()]) if found is not None]
    if captured.is_plain:
        options = {name: captured.candidates[0].config.get(name) for name in OPTIONS}
        tuners = [plain_tuner(kernel, options, captured.keys) for kernel in tuners]
    tuners = [tuner for tuner in tuners if tuner.base_fn.__qualname__ == captured.kernel.name]
    same = [tuner for tuner in tuners if bytecode_digest(tuner.base_fn) == captured.bytecode]
    is_other_bytecode = not same
    same = same or [tuner for tuner in tuners if source_digest(tuner.base_fn) == captured.source]
    if tuners and not same:
        raise ReplayError(f"{name}: its source has changed since it was captured: capture again")
    if not same:
        raise ReplayError(f"{name}: {file} does not autotune it here: set the environment variables of the program")
    present = read_globals(same[0].base_fn)
    for read, value in captured.globals.items():
        if present.get(read) != value:
            values = f"which was {value!r} when captured and is {present.get(read)!r} here"
            raise ReplayError(f"{name}: the kernel reads {read}, {values}")
    if is_other_bytecode and captured.versions.get("python") == python_version():  # another Python has other bytecode
        raise ReplayError(f"{name}: the file has several kernels of this name: give each a name of its own")
    return next((tuner for tuner in same if configs_digest(tuner.configs) == captured.configs), same[0])


@cache
def _module(name: KernelName, file: str, argv: tuple[str, ...], folders: tuple[str, ...]) -> Any:
    """Import the module that holds a kernel as the program did: from its folders, with its arguments in sys.argv."""
    path, here = Path(file), str(Path.cwd())
    for folder in (*folders, here, str(path.parent) if path.is_relative_to(here) else ""):
        if folder and folder not in sys.path:
            sys.path.append(folder)
    is_program = name.module == "__main__"
    if is_program and not path.is_file():
        raise ReplayError(f"{path}: the program's file is gone")
    what, before = str(path) if is_program else f"{name.module} ({file})", sys.argv
    sys.argv = list(argv) or before
    try:
        with _first_configs():
            return load_program(path, name.name) if is_program else importlib.import_module(name.module)
    except ModuleNotFoundError as error:
        raise ReplayError(f"{what}: {error}: set PYTHONPATH to the folders that the program imports from") from error
    except (Exception, SystemExit) as error:
        raise ReplayError(f"{what}: importing fails here: {describe_error(error)}") from error
    finally:
        sys.argv = before


@contextmanager
def _first_configs() -> Iterator[None]:
    """Have kernels that a module launches while it is imported run their first configs, where nothing can be timed."""
    from triton.runtime.autotuner import Autotuner  # in a fresh process nothing else has imported it

    before = Autotuner.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        config = kernel.configs[0]
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(kernel.arg_names, args, strict=False)), **kwargs, **config.all_kwargs()})
        return kernel.fn.run(*args, **kwargs, **config.all_kwargs())

    if is_interpreted():
        Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = before


PROGRAM_MODULE = "__mp_main__"
"""Name of the module: multiprocessing's workers call the program's file so."""
_SETTINGS = frozenset(("os.environ", "sys.path"))
"""Programs set these because their imports depend on them."""
_READS = re.compile("LOAD_.*(NAME|GLOBAL).*")
_DECORATOR = re.compile("tune|^jit$|^heuristics$")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def load_program(path: Path, kernel: str) -> ModuleType:
    """Execute the statements that a kernel of a program's file needs; returns the module that holds it.

    kernel: its qualified name.

    Raises:
        OSError: the file cannot be read.
        SyntaxError: it is no Python.
        Exception: what its statements raise.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    tree.body = needed(tree.body, kernel.partition(".")[0])
    module = ModuleType(PROGRAM_MODULE)
    module.__file__, module.__package__ = str(path), _package(path)
    sys.modules[PROGRAM_MODULE] = module  # inspect looks for sources there
    exec(compile(tree, str(path), "exec"), module.__dict__)
    return module


def _package(path: Path) -> str:
    """Return the package that a file belongs to, empty for none; makes the package and the file's neighbours importable."""
    folder, names = path.parent, []
    while (folder / "__init__.py").is_file():
        names.append(folder.name)
        folder = folder.parent
    for entry in (path.parent, folder):
        if str(entry) not in sys.path:
            sys.path.append(str(entry))
    return ".".join(reversed(names))


def needed(statements: Sequence[ast.stmt], name: str) -> list[ast.stmt]:
    """Return the statements of a module that a definition of a name needs, in their order."""
    bound = [_bound(one) for one in statements]
    wanted = _decorated(statements, bound, name)
    last = max((place for place, names in enumerate(bound) if names & wanted), default=0)
    changes = [_changes(one) for one in statements[:last]]
    chosen, data = set[int](), set(_SETTINGS)
    while True:
        found = {place for place, names in enumerate(bound) if place not in chosen and names & wanted}
        found |= {place for place, names in enumerate(changes) if place not in chosen and names & data}
        if not found:
            future = {n for n, each in enumerate(statements) if isinstance(each, ast.ImportFrom) and each.module == "__future__"}
            return [statements[place] for place in sorted(chosen | future)]
        chosen |= found
        for place in found:
            wanted |= _named(statements[place])
            if not isinstance(statements[place], (*_DEFINITIONS, ast.Import, ast.ImportFrom)):
                data |= bound[place]


def _decorated(statements: Sequence[ast.stmt], bound: Sequence[set[str]], name: str) -> set[str]:
    """Return a kernel's name and the names it has as `tuned = triton.autotune(...)(name)`."""
    found = {name}
    for one, names in zip(statements, bound, strict=True):
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Call):
            inside = list(_outside_definitions([one.value]))
            given = {node.id for call in inside if isinstance(call, ast.Call) for node in call.args if isinstance(node, ast.Name)}
            called = {node.attr if isinstance(node, ast.Attribute) else node.id for node in inside if _is_name(node)}
            if given & found and any(_DECORATOR.search(text) for text in called):
                found |= names
    return found


def _is_name(node: ast.AST) -> TypeGuard[ast.Attribute | ast.Name]:
    return isinstance(node, ast.Attribute | ast.Name)


def _bound(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module gives a value."""
    return {str(one.argval) for one in dis.get_instructions(_code(statement)) if one.opname in ("STORE_NAME", "STORE_GLOBAL")}


def _named(statement: ast.stmt) -> set[str]:
    """Return the names of the module that a statement reads, inside functions as well."""
    found, codes = set(), [_code(statement)]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        found |= {str(one.argval) for one in dis.get_instructions(code) if _READS.fullmatch(one.opname)}
    return found


def _code(statement: ast.stmt) -> CodeType:
    """Compile a statement of a module by itself."""
    return compile(ast.Module([statement], []), "<statement>", "exec", dont_inherit=True)


def _changes(statement: ast.stmt) -> set[str]:
    """Return the objects whose items or attributes a statement stores, or whose methods it calls: `a` and `a.b` of a.b.c()."""
    found = set()
    for node in _outside_definitions([statement]):
        stored = isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store)
        owner = node.func if isinstance(node, ast.Call) else node if stored else None
        names = _chain(owner) if isinstance(owner, ast.Attribute | ast.Subscript) else []
        found |= {".".join(names[:1]), ".".join(names[:2])} - {""}
    return found


def _chain(node: ast.expr) -> list[str]:
    """Return the names of a.b[0].c from left to right, none where the left end is no name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _outside_definitions(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield nodes and the nodes below them, but nothing inside a function or a class."""
    for node in nodes:
        yield node
        if not isinstance(node, (*_DEFINITIONS, ast.Lambda)):
            yield from _outside_definitions(ast.iter_child_nodes(node))
