"""Processes that tests start."""

import os
from pathlib import Path

TESTS = Path(__file__).parent


def environment(**more: str) -> dict[str, str]:
    """This process's environment, where the package and the tests' modules are found before what PYTHONPATH names already."""
    found = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(found)} | more
