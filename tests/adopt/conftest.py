"""Every test leaves Triton as it found it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adopted import example, forget, imported
from plain_kernels import SOURCE

from kerneltune.adopt import program, startup


@pytest.fixture(autouse=True)
def untouched_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (startup.CAPTURE, startup.ADOPT):
        monkeypatch.delenv(name, raising=False)
    program.warn_once.cache_clear()
    yield
    startup.uninstall()
    forget(example())


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a module with a kernel that no autotuner wraps."""
    yield from imported(tmp_path, monkeypatch, "of_plain_kernels", SOURCE)
