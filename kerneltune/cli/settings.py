"""Apply `[tool.kerneltune]` of the current folder's pyproject.toml: plug-ins and folders."""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kerneltune.cache import CONFIGS
from kerneltune.files import RESULTS, checked, read_bytes
from kerneltune.spec import PLUGINS

_FILE = Path("pyproject.toml")
_MAX_BYTES = 1 << 20
"""Bytes of the largest file that is read."""
_Text = Annotated[str, msgspec.Meta(min_length=1)]


class _Settings(msgspec.Struct, forbid_unknown_fields=True):
    plugins: list[_Text] = []
    results: _Text | None = None
    configs: _Text | None = None


def apply() -> None:
    """Set an environment variable for each setting of `[tool.kerneltune]`; variables that are set already stay."""
    table = _table()
    try:
        settings = checked(table, _Settings)
    except ValueError as error:
        raise ValueError(f"{_FILE}: tool.kerneltune.{error}") from error
    if settings.plugins:
        known = [item for item in os.environ.get(PLUGINS, "").split(os.pathsep) if item]
        os.environ[PLUGINS] = os.pathsep.join(dict.fromkeys([*known, *settings.plugins]))
    for variable, value in ((RESULTS, settings.results), (CONFIGS, settings.configs)):
        if value is not None:
            os.environ.setdefault(variable, value)


def source_of(message: str) -> str:
    """Return `; pyproject.toml names it …` if a message is of a plug-in of the settings, else nothing."""
    names = _table().get("plugins", ()) if message.startswith("plug-in ") else ()
    return (
        f"; {_FILE} names it in tool.kerneltune.plugins" if any(message.startswith(f"plug-in {name}: ") for name in names) else ""
    )


def _table() -> Any:
    """Return the value of `[tool.kerneltune]`; empty without a file or a table."""
    try:
        text = read_bytes(_FILE, _MAX_BYTES).decode(errors="surrogateescape")
    except ValueError:
        return {}
    try:
        tools = tomllib.loads(text).get("tool", {})
    except (ValueError, RecursionError) as error:  # a file without settings of this package may be broken
        if "kerneltune" not in text:
            return {}
        raise ValueError(f"{_FILE}: {str(error)[:120]}") from error
    return tools.get("kerneltune", {}) if isinstance(tools, dict) else {}
