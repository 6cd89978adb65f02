"""Private names of other packages: each is there, and no other file imports one."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import kerneltune
from kerneltune import compat
from kerneltune.compat import PRIVATE_NAMES, PrivateName

PACKAGE = Path(kerneltune.__file__).parent


@pytest.mark.parametrize("name", PRIVATE_NAMES, ids=lambda name: name.path)
def test_private_name_is_in_the_installed_package(name: PrivateName) -> None:
    module, _, attributes = name.path.partition(":")
    pytest.importorskip(module.partition(".")[0])
    found: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        found = found() if isinstance(found, type) and not hasattr(found, attribute) else found
        found = getattr(found, attribute)


def private_imports(source: str) -> list[str]:
    """Return the private modules and names of torch, Triton and transformers that a file imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("torch", "triton", "transformers"):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if any(part.startswith("_") for part in name.split("."))]


def test_private_imports_of_a_file_are_found() -> None:
    assert private_imports("from torch._compile import f\nfrom torch import nn, _C\nfrom kerneltune._x import y") == [
        "torch._compile.f", "torch._C",
    ]  # fmt: skip


@pytest.mark.parametrize("folder", ["nn", "workloads", "ops"])
def test_only_compat_imports_private_names(folder: str) -> None:
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert len(files) > 5
    assert [name for file in files for name in private_imports(file.read_text(encoding="utf-8"))] == []


def test_compiled_module_is_told_from_another() -> None:
    import torch

    layer, whole = nn.Linear(1, 1), nn.Linear(1, 1)
    assert not compat.is_compiled(layer)
    layer.compile(backend="eager")
    assert compat.is_compiled(layer)
    assert compat.is_compiled(torch.compile(whole, backend="eager"))
    assert not compat.is_compiled(whole)
