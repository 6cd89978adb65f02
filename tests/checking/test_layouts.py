"""Whose questions about the layout of an input count."""

import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fake_operator import OP

from kerneltune.checking.check import host_folder
from kerneltune.checking.layouts import noting_layouts

ASK = "def ask(tensor):\n    return tensor.stride()\n"


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("{}/op.py", True),
        ("{}/kernels/host.py", True),
        ("{}/.venv/lib/python3.11/site-packages/triton/interpreter.py", False),
        ("{}/env/lib/python3.11/copy.py", False),
        ("{}/.venv/lib/python3.11/site-packages/own.py", False),
    ],
)
def test_only_code_beside_the_operator_asks_for_layouts(file: str, counts: bool, tmp_path: Path) -> None:
    assert _asked(_ask_of(Path(file.format(tmp_path))), f"{tmp_path}/") == (["x"] if counts else [])


def test_installed_module_without_a_folder_is_its_own_host_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    own, other = packages / "own.py", packages / "triton" / "interpreter.py"
    module = ModuleType("own")
    module.__file__ = str(own)
    monkeypatch.setitem(sys.modules, "own", module)
    folder = host_folder(replace(OP, module="own"))
    assert (_asked(_ask_of(own), folder), _asked(_ask_of(other), folder)) == (["x"], [])


def _ask_of(file: Path) -> object:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(ASK)
    return runpy.run_path(str(file))["ask"]


def _asked(ask: object, folder: str) -> list[str]:
    assert callable(ask)
    inputs = {"x": torch.zeros(2, 2)}
    with noting_layouts(inputs, folder) as read:
        ask(inputs["x"])
    return read
