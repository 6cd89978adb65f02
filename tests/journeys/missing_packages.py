"""Print the requirements of the package, and of its GPU tests, that cannot be imported."""

import importlib.util
import re
import tomllib
from pathlib import Path

MODULES = {"pyyaml": "yaml", "nvidia-ml-py": "pynvml", "pytest-xdist": "xdist"}
"""Requirements whose module has another name."""
OF_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")


def missing(requirements: list[str]) -> list[str]:
    """Return the requirements without a module here."""
    names = {text: re.split(r"[^\w-]", text)[0] for text in requirements}
    return [text for text, name in names.items() if importlib.util.find_spec(MODULES.get(name, name.replace("-", "_"))) is None]


if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    print(" ".join(missing([*project["dependencies"], *OF_TESTS])))
