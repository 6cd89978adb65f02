"""Kernels that a reader can hold in the head, and constants that say why they have their values."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import kerneltune

PACKAGE = Path(kerneltune.__file__).parent
OPS = sorted((PACKAGE / "ops").rglob("*.py"))
DEVICE_CODE = [*OPS, *sorted((PACKAGE / "kernel_lib").glob("*.py"))]
MOST_LINES = 90
MOST_PARAMETERS = 20
IDS = {"argnames": "path", "ids": lambda path: str(path.relative_to(PACKAGE))}


def kernels(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(one) for one in node.decorator_list):
            yield node


def names_of(statement: ast.stmt) -> list[str]:
    """Return the constants that a statement binds, names of capital letters; no operator and no variant."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]  # type: ignore[attr-defined]
    used = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    if any(isinstance(call, ast.Name) and call.id in ("Op", "Variant") for call in used):
        return []
    names = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    return [name for name in names if name.strip("_").isupper() and name != "__all__"]


def constants_without_a_reason(source: str) -> list[str]:
    """Return constants at the top of a module beside which neither a comment nor a docstring stands.

    A comment or docstring serves constants on adjacent lines.
    """
    lines, body = source.splitlines(), ast.parse(source).body
    blocks: list[tuple[list[str], bool]] = []
    last_line = -1
    for statement, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(statement, ast.Assign | ast.AnnAssign):
            continue
        text = [lines[statement.lineno - 2], *lines[statement.lineno - 1 : statement.end_lineno]]
        has_reason = text[0].startswith("#") or any("  # " in line and "# fmt" not in line for line in text[1:])
        has_reason |= isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        if statement.lineno == last_line + 1:
            names, told_before = blocks.pop()
            blocks.append((names + names_of(statement), has_reason or told_before))
        else:
            blocks.append((names_of(statement), has_reason))
        last_line = statement.end_lineno or 0
    return [name for names, has_reason in blocks if not has_reason for name in names]


def test_constants_without_a_reason_finds_only_those_without_a_comment() -> None:
    source = (
        "A = 1\n\nB = 2  # as C\nC = 2\n\n# measured\nD = 3\n\n"
        'E, F = 4, 5\n"""Both."""\nname = 6\n\n_G: int = 7\n\nH = (\n    8,\n)\n'
    )
    assert constants_without_a_reason(source) == ["A", "_G", "H"]


@pytest.mark.parametrize(argvalues=DEVICE_CODE, **IDS)
def test_kernels_are_short_and_have_few_parameters(path: Path) -> None:
    sizes = {node.name: (node.end_lineno - node.lineno + 1, len(node.args.args)) for node in kernels(path) if node.end_lineno}
    assert {name: size for name, size in sizes.items() if size[0] > MOST_LINES or size[1] > MOST_PARAMETERS} == {}


def test_kernels_of_operators_are_more_than_150() -> None:
    assert sum(len(list(kernels(path))) for path in DEVICE_CODE) > 150


@pytest.mark.parametrize(argvalues=OPS, **IDS)
def test_module_constants_of_operators_have_a_reason(path: Path) -> None:
    assert constants_without_a_reason(path.read_text()) == []
