"""Every test leaves Triton as it found it."""

from collections.abc import Iterator

import pytest
from adopted import example, forget

from kerneltune.adopt import program, startup


@pytest.fixture(autouse=True)
def untouched_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (startup.CAPTURE, startup.ADOPT):
        monkeypatch.delenv(name, raising=False)
    program.warn_once.cache_clear()
    yield
    startup.uninstall()
    forget(example())
