"""Find operators: modules here that have `OP` or `OPS`, alone or in a folder, and operators of other packages.

Presence in the folder is registration. From outside: the entry-point group `kerneltune.ops` of an installed package, or a
module or .py file in KERNELTUNE_PLUGINS (which `kerneltune --plugin` extends); each gives `OPS`, a tuple of Op, or `OP`.
"""

import importlib
import importlib.metadata
import itertools
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from kerneltune.errors import statement_in
from kerneltune.listing import OpSummary, check_contract, listed, same_name, summary_of
from kerneltune.spec import GROUP, PLUGINS, Op


def load() -> dict[str, Op]:
    """Return all operators by name; imports torch and triton.

    Raises:
        ValueError: two operators have the same name, a contract contradicts itself, or a plug-in cannot be used.
    """
    return load_with(os.environ.get(PLUGINS, ""))


def summaries(before_import: Callable[[], None] = lambda: None) -> dict[str, OpSummary]:
    """Return the summaries of all operators by name; imports neither torch nor triton, unless a plug-in does.

    Args:
        before_import: called before the code of an operator is imported.

    Raises:
        ValueError: as `load`, of plug-ins.
    """
    found = listed(modules(), operators_in, before_import)
    plugins = os.environ.get(PLUGINS, "")
    if plugins or importlib.metadata.entry_points(group=GROUP):
        before_import()
        for op in _plugged_in(plugins):
            if op.name in found:
                load()  # says where both are
            found[op.name] = summary_of(op)
    return found


def modules() -> list[str]:
    """Return the names of the modules and packages in this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__, f"{__name__}."))


@cache
def load_with(plugins: str) -> dict[str, Op]:
    """Load all operators, with plug-ins separated as paths are."""
    loaded: dict[str, Op] = {}
    for op in (*itertools.chain.from_iterable(map(operators_in, modules())), *_plugged_in(plugins)):
        known = loaded.setdefault(op.name, op)
        if known is not op:
            raise same_name(known, op)
    return loaded


def operators_in(name: str) -> tuple[Op, ...]:
    """Import a module or a folder of modules and return the operators in it."""
    module = importlib.import_module(name)
    if hasattr(module, "OPS") or hasattr(module, "OP"):
        operators = tuple(getattr(module, "OPS", ())) or (module.OP,)
    else:
        names = sorted(inside.name for inside in pkgutil.iter_modules(module.__path__, f"{name}.") if not inside.ispkg)
        operators = tuple(inside.OP for inside in map(importlib.import_module, names) if hasattr(inside, "OP"))
    for op in operators:
        check_contract(op)
    return operators


def _plugged_in(plugins: str) -> tuple[Op, ...]:
    """Return the operators of other packages."""
    operators: tuple[Op, ...] = ()
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda p: (p.name, p.value)):
        package = f" of package {point.dist.name}" if point.dist else ""
        operators += _plugged(f"{point.name}{package}", point.load)
    for name in dict.fromkeys(filter(None, plugins.split(os.pathsep))):
        operators += _plugged(name, partial(_module, name))
    return operators


def _plugged(name: str, get: Callable[[], Any]) -> tuple[Op, ...]:
    """Return the operators of a plug-in: a module with OPS or OP, or OPS itself."""
    try:
        given = get()
    except (Exception, SystemExit) as error:  # whatever a stranger's module raises on import
        hint = ": the field is called `invalid` now" if str(error).endswith("unexpected keyword argument 'valid'") else ""
        raise ValueError(f"plug-in {name}: {_place(error)}{type(error).__name__}: {error}{hint}") from error
    ops = getattr(given, "OPS", (given.OP,) if hasattr(given, "OP") else given)
    if not isinstance(ops, tuple | list) or not ops:
        raise ValueError(f"plug-in {name}: OPS: {'missing' if ops is given else type(ops).__name__}: expected a tuple of Op")
    for op in ops:
        if not isinstance(op, Op):
            raise ValueError(f"plug-in {name}: OPS: {op!r}: expected an Op")
        if op.module not in sys.modules:
            raise ValueError(f"plug-in {name}: module of {op.name}: {op.module!r}: expected the one that holds its source")
        try:
            check_contract(op)
        except ValueError as error:
            raise ValueError(f"plug-in {name}: {error}") from None
    return tuple(ops)


def _place(error: BaseException) -> str:
    """Return `FILE:LINE: ` of the user's statement that raised, else an installed plug-in's; empty if the import raised."""
    own, frames = f"{Path(__file__).parents[1]}/", traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if not frame.filename.startswith(("<frozen ", own))]
    is_import = not others or "importlib" in Path(others[-1].filename).parts
    return statement_in("", error) or ("" if is_import else f"{Path(others[-1].filename).name}:{others[-1].lineno}: ")


def _module(name: str) -> Any:
    """Import a module, also of the working folder, or a .py file; its folder goes on the path, where workers find it too."""
    file = Path(name).absolute() if name.endswith(".py") else None
    folder = str(file.parent if file else Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    if file and not file.is_file():
        raise ImportError(f"no such file: {file}")
    from kerneltune.interpreter.modes import without_gpu

    with without_gpu():
        module = importlib.import_module(file.stem if file else name)
    if file and Path(str(module.__file__)).resolve() != file.resolve():
        raise ImportError(f"another module is called {file.stem}: {module.__file__}; rename the file")
    return module
