"""Kernels of a program's own file: the statements that are executed to find a kernel."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kerneltune.adopt import replay

PROGRAM = '''
"""A script as many are: definitions and work in one."""
from __future__ import annotations
import argparse
import os
import helper
from .helper import TWO
os.environ["SEEN_BY_IMPORTS"] = "1"
WIDTHS = []
for width in (1, 2):
    WIDTHS.append(width)
parser = argparse.ArgumentParser()
parser.add_argument("--n", type=int, required=True)
args = parser.parse_args()
x = work()
print("training")
def kernel(x, n, check=lambda args: args["n"]):
    x = scale(x) * TWO
    return x, WIDTHS, n
class Kernels:
    plain = staticmethod(kernel)
TWO = TWO + LATER if False else TWO
def scale(x):
    return x * LATER
LATER = 3
print(kernel(x, args.n))
raise SystemExit(1)
'''


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the script as a module of a package."""
    folder = tmp_path / "package_of_program"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "helper.py").write_text("TWO = 2\n")
    (folder / "script.py").write_text(PROGRAM)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("SEEN_BY_IMPORTS", "0")
    before = sys.modules.get(replay.PROGRAM_MODULE)
    yield folder / "script.py"
    sys.modules.pop(replay.PROGRAM_MODULE, None)
    if before is not None:
        sys.modules[replay.PROGRAM_MODULE] = before
    for name in [name for name in sys.modules if name.startswith("package_of_program")]:
        del sys.modules[name]


def test_load_program_loads_a_kernel_without_running_the_script(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = replay.load_program(program, "kernel")
    assert module.kernel(7, 0) == (7 * 3 * 2, [1, 2], 0)
    assert module.__name__ == replay.PROGRAM_MODULE
    assert not {"args", "parser", "x", "argparse", "Kernels", "helper"} & set(vars(module))
    assert capsys.readouterr().out == ""


def test_load_program_loads_a_kernel_of_a_class_with_the_class(program: Path) -> None:
    module = replay.load_program(program, "Kernels.plain")
    assert module.Kernels.plain(1, 0)[0] == 6


def test_load_program_executes_settings_before_the_kernel(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    replay.load_program(program, "kernel")
    assert os.environ["SEEN_BY_IMPORTS"] == "1"


def test_needed_includes_a_call_that_decorates_the_kernel() -> None:
    text = """
import triton
def scale(x): ...
compiled = triton.jit(scale)
tuned = triton.autotune(configs=[], key=[])(compiled)
ms = autotune_report(lambda: tuned[(1,)](3))
y = tuned[(1,)](3)
print(scale)
"""
    statements = [ast.unparse(one).partition("\n")[0] for one in replay.needed(ast.parse(text).body, "tuned")]
    assert statements == [
        "import triton", "def scale(x):", "compiled = triton.jit(scale)", "tuned = triton.autotune(configs=[], key=[])(compiled)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "fill", ["for n in SIZES:\n    BY_SIZE[n] = tuned(n)", "BY_SIZE.update({1: tuned(1)})", "BY_SIZE.kernel = tuned(1)"]
)
def test_needed_includes_what_fills_a_container_later_and_no_launch(fill: str) -> None:
    text = f"SIZES = (1, 2)\nBY_SIZE = {{}}\nprint(1)\n{fill}\nx = work()\nBY_SIZE[1][(4,)](x)\n"
    statements = [ast.unparse(one) for one in replay.needed(ast.parse(text).body, "BY_SIZE")]
    assert statements == [*(["SIZES = (1, 2)"] if "SIZES" in fill else []), "BY_SIZE = {}", fill]


def test_needed_includes_the_attributes_of_a_function_and_no_call_of_it() -> None:
    text = "def hook(x):\n    hook.calls += 1\nhook.calls = 0\nhook.clear()\nk = tune(hook)\nhook.calls = work()\n"
    statements = [ast.unparse(one).partition("\n")[0] for one in replay.needed(ast.parse(text).body, "k")]
    assert statements == ["def hook(x):", "hook.calls = 0", "k = tune(hook)"]


def test_needed_includes_every_import_of_all_names() -> None:
    text = "try:\n    from fast import *\nexcept ImportError:\n    from slow import *\nx = work()\n@jit\ndef kernel(): ...\n"
    statements = [ast.unparse(one).partition("\n")[0] for one in replay.needed(ast.parse(text).body, "kernel")]
    assert statements == ["try:", "@jit"]


def test_needed_of_an_unknown_name_is_empty() -> None:
    assert replay.needed(ast.parse("import os\nos.environ['A'] = '1'\nprint(1)").body, "kernel") == []


def test_load_program_of_a_syntax_error_raises(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def (")
    with pytest.raises(SyntaxError):
        replay.load_program(tmp_path / "a.py", "kernel")
