"""Whether two measurements were made with the same code: a hash of what an operator's modules are made of.

Runs none of it. Imports the standard library.
"""

import ast
import hashlib
import importlib.util
import io
import tokenize
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path

_NOT_DECIDING = frozenset({"kerneltune", "kerneltune.spec", "kerneltune.device", "kerneltune.cache", "kerneltune.ops"})
"""Modules that change neither an operator's results nor its speed."""


@cache
def source_hash(module: str) -> str:
    """Hash of a module and of all that it imports of its own package and of this one, but for the nouns and the cache."""
    digest = hashlib.sha256()
    for name, file in sorted(_sources(module, {}).items()):
        digest.update(name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


@cache
def code_hash(module: str) -> str:
    """`source_hash` of what runs alone: comments, docstrings and empty lines have no part in it."""
    digest = hashlib.sha256()
    for name, file in sorted(_sources(module, {}).items()):
        digest.update(f"{name}\n{_code(file.read_text(encoding='utf-8'))}\n".encode())
    return digest.hexdigest()[:12]


def _code(source: str) -> str:
    """Made of the text, not printed from its tree, which versions of Python print differently."""
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        match node:  # a string alone, in lines of its own
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                if not lines[first - 1][: node.col_offset].strip():
                    lines[first - 1 : last] = [""] * (last - first + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _sources(module: str, found: dict[str, Path]) -> dict[str, Path]:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or module in found or module in _NOT_DECIDING:
        return found
    found[module] = Path(spec.origin)
    shown = {module.partition(".")[0], "kerneltune"}
    for node in ast.walk(ast.parse(found[module].read_bytes())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            base = _imported_from(node, spec)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.partition(".")[0] in shown and _is_module(name):
                _sources(name, found)
    return found


def _imported_from(node: ast.ImportFrom, spec: ModuleSpec) -> str:
    """The module of `from … import …`, which may be relative to the package of the module that says so."""
    if not node.level:
        return node.module or ""
    package = spec.name if spec.submodule_search_locations is not None else spec.name.rpartition(".")[0]
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a name inside a module that is no package
        return False
