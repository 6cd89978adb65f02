"""What an error says on one line."""

import pytest

from kerneltune.errors import first_line


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("one"), "ValueError: one"),
        (RuntimeError("\n  first \nsecond"), "RuntimeError: first"),
        (AssertionError(), "AssertionError"),
        (KeyboardInterrupt(" \n "), "KeyboardInterrupt"),
        (ValueError("x" * 300), f"ValueError: {'x' * 200}"),
    ],
)
def test_the_first_line_that_says_something(error: BaseException, text: str) -> None:
    assert first_line(error) == text
