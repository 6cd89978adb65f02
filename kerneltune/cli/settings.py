"""`[tool.kerneltune]` of the current folder's pyproject.toml: plug-ins, folders and the default family."""

import os
import tomllib
from pathlib import Path
from typing import Any

from kerneltune.files import RESULTS, read_bytes
from kerneltune.spec import PLUGINS

FAMILY = "KERNELTUNE_FAMILY"
"""Environment variable: the family of a command that names none."""
_FOLDERS = {"results": RESULTS, "configs": "KERNELTUNE_CONFIGS"}
_FILE = Path("pyproject.toml")
_LARGEST = 1 << 20
"""Bytes of the largest file that is read."""


def apply() -> None:
    """Set the environment variables that `[tool.kerneltune]` stands for; variables that are set already win.

    Raises:
        ValueError: `pyproject.toml: tool.kerneltune.field: value: expected …`.
    """
    found = _table()
    for name, value in found.items():
        if name == "plugins":
            if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
                raise _bad(name, value, "a list of modules or .py files")
            known = [item for item in os.environ.get(PLUGINS, "").split(os.pathsep) if item]
            os.environ[PLUGINS] = os.pathsep.join(dict.fromkeys([*known, *value]))
        elif name in (*_FOLDERS, "family"):
            if not isinstance(value, str) or not value:
                raise _bad(name, value, "a text")
            os.environ.setdefault(_FOLDERS.get(name, FAMILY), value)
        else:
            raise _bad(name, value, f"one of plugins, family, {', '.join(_FOLDERS)}")


def _table() -> dict[str, Any]:
    try:
        text = read_bytes(_FILE, _LARGEST).decode(errors="surrogateescape")
    except ValueError:
        return {}
    try:
        tools = tomllib.loads(text).get("tool", {})
    except (ValueError, RecursionError) as error:  # another tool's business, unless it names us
        if "kerneltune" not in text:
            return {}
        raise ValueError(f"{_FILE}: {str(error)[:120]}") from error
    found = tools.get("kerneltune", {}) if isinstance(tools, dict) else {}
    if not isinstance(found, dict):
        raise ValueError(f"{_FILE}: tool.kerneltune: {found!r}: expected a table")
    return found


def _bad(name: str, value: object, expected: str) -> ValueError:
    return ValueError(f"{_FILE}: tool.kerneltune.{name}: {value!r}: expected {expected}")
