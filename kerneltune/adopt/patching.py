"""The one place that changes Triton: `Autotuner.run` and `Autotuner.__init__`, as soon as the program imports them.

Subclasses that call `super().run` are reached, and kernels that were decorated before. Imports the standard library.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

TARGET = "triton.runtime.autotuner"
_MARK = "_kerneltune_original"


class _Waiting(importlib.abc.MetaPathFinder):
    """Waits for one module to be imported, then acts on it once."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Let the other finders find the module, and have its loader tell when it is there."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._act(module)

        loader.exec_module = exec_module
        return spec


def when_imported(name: str, act: Callable[[ModuleType], None]) -> None:
    """Act on a module now if it is loaded, else as soon as it is."""
    module = sys.modules.get(name)
    if module is not None:
        act(module)
    else:
        sys.meta_path.insert(0, _Waiting(name, act))


def replace_method(owner: type[Any], name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method by what `make` makes of the original; a method that was replaced before is replaced anew."""
    present = getattr(owner, name)
    original = getattr(present, _MARK, present)
    replaced: Any = functools.update_wrapper(make(original), original)  # torch.compile reads the signature
    setattr(replaced, _MARK, original)
    setattr(owner, name, replaced)


def restore_method(owner: type[Any], name: str) -> None:
    """Put the original method back."""
    present = getattr(owner, name)
    setattr(owner, name, getattr(present, _MARK, present))
