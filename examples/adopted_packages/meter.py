"""Measure the time of a program in Triton's autotuner: wrap `Autotuner.run` and `JITFunction.run`, whoever patched them."""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction


@dataclass
class Meter:
    """Seconds since the start of the meter.

    Attributes:
        total_s: in Autotuner.run, compiling, launching and timing included.
        launch_s: of it in JITFunction.run: compiling, loading and launching.
        launches: calls of Autotuner.run.
    """

    total_s: float = 0.0
    launch_s: float = 0.0
    launches: int = 0
    _depth: int = 0

    def start(self) -> "Meter":
        """Wrap both methods."""
        Autotuner.run = self._outer(Autotuner.run)
        JITFunction.run = self._inner(JITFunction.run)
        return self

    def _outer(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(autotuner: Any, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.perf_counter()
            try:
                return run(autotuner, *args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.total_s += time.perf_counter() - began
                    self.launches += 1

        return timed

    def _inner(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def timed(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return run(kernel, *args, **kwargs)
            finally:
                if self._depth:
                    self.launch_s += time.perf_counter() - began

        return timed


def chosen_configs() -> dict[str, str]:
    """Return the config that each autotuned kernel was launched with last."""
    tuners = [found for found in gc.get_objects() if isinstance(found, Autotuner)]
    return {one.base_fn.__name__: str(one.best_config) for one in tuners if getattr(one, "best_config", None) is not None}


def serving_counts() -> dict[str, int] | None:
    """Return how many kinds of launches were served, missed and tuned by the author's autotuner; None where nothing is served."""
    from kerneltune.adopt import startup

    server = startup.server()
    return None if server is None else {name: getattr(server, name) for name in ("hits", "misses", "tunings")}
