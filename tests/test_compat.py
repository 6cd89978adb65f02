"""Private names of other packages: each exists, and no other file imports private names."""

import ast
import importlib
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import kerneltune
from kerneltune import compat

PACKAGE = Path(kerneltune.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "private_names.md"
ROWS = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
NAMES = [name.strip("`") for names, *_ in ROWS for name in names.split()]


def test_each_private_name_has_a_purpose_and_a_consequence() -> None:
    assert len(NAMES) == len(set(NAMES)) > 40
    assert [row for row in ROWS if len(row) != 3 or not all(row)] == []


@pytest.mark.parametrize("name", NAMES)
def test_private_name_exists_in_the_installed_package(name: str) -> None:
    module, _, attributes = name.partition(":")
    pytest.importorskip(module.partition(".")[0])
    value: Any = importlib.import_module(module)
    for attribute in attributes.split("."):
        value = value() if isinstance(value, type) and not hasattr(value, attribute) else value
        value = getattr(value, attribute)


def private_imports(source: str) -> list[str]:
    """Return the private modules and names of torch, Triton and transformers that a file imports."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("torch", "triton", "transformers"):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if any(part.startswith("_") for part in name.split("."))]


def test_private_imports_of_a_file_are_found() -> None:
    assert private_imports("from torch._compile import f\nfrom torch import nn, _C\nfrom kerneltune._x import y") == [
        "torch._compile.f", "torch._C",
    ]  # fmt: skip


@pytest.mark.parametrize("folder", ["nn", "workloads", "ops"])
def test_only_compat_imports_private_names(folder: str) -> None:
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert len(files) > 5
    assert [name for file in files for name in private_imports(file.read_text(encoding="utf-8"))] == []


def test_is_compiled_is_true_for_compiled_modules_only() -> None:
    import torch

    layer, whole = nn.Linear(1, 1), nn.Linear(1, 1)
    assert not compat.is_compiled(layer)
    layer.compile(backend="eager")
    assert compat.is_compiled(layer)
    assert compat.is_compiled(torch.compile(whole, backend="eager"))
    assert not compat.is_compiled(whole)
