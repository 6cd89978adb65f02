"""Share the limits of checks of planted mistakes."""

import pytest

from kerneltune.interpreter import undefined


@pytest.fixture
def short_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge the addresses of each launch for half a second: a right kernel whose programs visit every row takes all the time."""
    monkeypatch.setattr(undefined, "LAUNCH_SECONDS", 0.5)
