"""Where configs of one variant on one case are checked and timed, in this process.

Decides nothing and stores nothing. May import torch.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from kerneltune import device
from kerneltune.errors import first_line
from kerneltune.measuring.check import Checker
from kerneltune.measuring.compiler import know_triton
from kerneltune.measuring.memory import OutOfMemory, affordable, out_of_memory_reason
from kerneltune.measuring.rounds import POLICIES, Contender, interleave, rotation
from kerneltune.search.trials import Evaluation
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.stats import Samples

TRIED_WHOLE = 20
"""Spaces up to this size are published lists, and run even where they spill."""
SCREEN_SAMPLES = 5
_SCREEN_US = 250.0
_REJECTED_AT = 1.3
"""A config whose first sample is slower than the best so far by this factor gets no others."""


class Measuring(Protocol):
    """A bench."""

    def open(self, op: Op, case: Case, variant: Variant, policy: str) -> None:
        """Make ready for the configs of a variant on a case."""

    def prepare(self) -> None:
        """Do now what `open` has put off until the first config."""

    def trial(self, config: Config, best_us: float | None, samples: int = SCREEN_SAMPLES) -> Evaluation:
        """Check a config and time it roughly; one far slower than best_us, where that is given, gets one sample."""

    def samples(self, configs: Sequence[Config]) -> Sequence[Samples | None]:
        """Time correct configs interleaved; (rounds,) microseconds for each, None where those before leave no memory."""

    def close(self) -> None:
        """Give the memory of inputs and reference back."""


class GpuBench:
    """A bench on the GPU of this process."""

    def __init__(self) -> None:
        """Begin with what every case needs, a context on the GPU and Triton's driver; `open` waits for it."""
        self._checker: Checker | None = None
        self._inputs: list[Any] = []
        beside = ThreadPoolExecutor(1)
        self._launchable = beside.submit(open_driver)
        beside.shutdown(wait=False)

    def open(self, op: Op, case: Case, variant: Variant, policy: str) -> None:
        """Make inputs and reference."""
        self._variant, self._policy = variant, POLICIES[policy]
        self._checker = Checker(op, case, "cuda")
        free, _ = torch.cuda.mem_get_info()
        sets = rotation(self._policy, op.traffic(case).total, device.current().l2_bytes, free)
        self._inputs = [op.inputs(case, device="cuda", seed=i) for i in range(sets)]
        self._launchable.result()

    def prepare(self) -> None:
        """Do nothing: nothing is put off."""

    def trial(self, config: Config, best_us: float | None, samples: int = SCREEN_SAMPLES) -> Evaluation:
        """Return the median of the samples, or one sample of a config that is far behind."""
        tried = affordable(lambda: self._tried(config, best_us, samples))
        return Evaluation("memory", detail=tried.reason) if isinstance(tried, OutOfMemory) else tried

    def _tried(self, config: Config, best_us: float | None, samples: int) -> Evaluation:
        assert self._checker is not None
        errors = self._checker.errors(self._variant, config)
        if errors:
            return Evaluation("wrong", detail="; ".join(errors))
        try:
            contender = self._contender(config, _SCREEN_US)
            times = [contender.sample_us()]
            while len(times) < samples and not (best_us and times[0] > _REJECTED_AT * best_us):
                times.append(contender.sample_us())
            return Evaluation("ok", time_us=float(np.median(times)))
        except RuntimeError as error:
            if out_of_memory_reason(error):
                raise
            return Evaluation("failed", detail=first_line(error))

    def samples(self, configs: Sequence[Config]) -> list[Samples | None]:
        """Run rounds until the ratios to the first are known well."""
        contenders = {"0": self._contender(configs[0])}  # the others are held against it: without it there is no answer
        for i, config in enumerate(configs[1:], start=1):
            beside = affordable(partial(self._contender, config))
            if not isinstance(beside, OutOfMemory):
                contenders[str(i)] = beside
        samples = interleave(contenders, min_rounds=15, max_rounds=40)
        return [samples.get(str(i)) for i in range(len(configs))]

    def close(self) -> None:
        """Free the tensors."""
        self._checker, self._inputs = None, []
        torch.cuda.empty_cache()

    def _contender(self, config: Config, sample_us: float = 800.0) -> Contender:
        return Contender(lambda i: self._variant.run(self._inputs[i], config), len(self._inputs), self._policy, sample_us)


def open_driver() -> None:
    """Open a context on the GPU and Triton's driver, which compiles and loads a C module, before a launch needs them."""
    from triton.runtime.driver import driver

    torch.cuda.synchronize()
    driver.active.get_current_device()
    know_triton()


class CheckBench:
    """A bench that checks and times nothing. What a case needs is kept until the next case."""

    def __init__(self) -> None:
        self._of: tuple[str, Case] | None = None
        self._checker: Checker | OutOfMemory | None = None

    def open(self, op: Op, case: Case, variant: Variant, policy: str) -> None:
        """Make inputs and reference, if the case is another."""
        self._variant = variant
        if self._of != (op.name, case):
            self._of = self._checker = None
            self._checker, self._of = affordable(lambda: Checker(op, case, "cuda")), (op.name, case)

    def prepare(self) -> None:
        """Do nothing: nothing is put off."""

    def trial(self, config: Config, best_us: float | None, samples: int = SCREEN_SAMPLES) -> Evaluation:
        """`ok`, `wrong` or `memory`."""
        checker = self._checker
        assert checker is not None
        errors = checker if isinstance(checker, OutOfMemory) else affordable(lambda: checker.errors(self._variant, config))
        if isinstance(errors, OutOfMemory):
            return Evaluation("memory", detail=errors.reason)
        return Evaluation("wrong", detail="; ".join(errors)) if errors else Evaluation("ok")

    def samples(self, configs: Sequence[Config]) -> list[Samples]:
        """Raise: a bench that checks has no times to give."""
        raise NotImplementedError

    def close(self) -> None:
        """Keep all for the next variant of the case."""
