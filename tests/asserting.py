"""Conditions that tests assert."""

from collections.abc import Iterable


def every(conditions: Iterable[object]) -> bool:
    """Return whether there is a condition and all hold: `all` also holds where a test has nothing to look at."""
    results = list(conditions)
    return bool(results) and all(results)
