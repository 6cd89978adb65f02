"""Sample callables in interleaved rounds, with a cold or hot L2, as CUDA graphs or launch by launch."""

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kerneltune import device
from kerneltune.checking.memory import out_of_memory_reason
from kerneltune.compat import sleep_on_gpu
from kerneltune.errors import first_line, statement_in
from kerneltune.interpreter.faults import causes
from kerneltune.stats import Samples, ratio_interval
from kerneltune.task import SkippedError

_MIN_CALLS = 10
"""Fewest calls in a sample."""
_LONG_SAMPLES = 4
"""Factor by which a sample may become longer than asked for, so that it has `_MIN_CALLS` calls."""
_MIN_SAMPLE_US = 800.0
_ROUNDS_S = 25.0
"""Seconds after which rounds stop: a round of whole training steps takes 4 s, so that 60 rounds would take 4 minutes a case. The
60 rounds of the longest other case, a `moe_step`, take 23 s (H200, 2026-11-26)."""
_FEWEST_ROUNDS = 7
"""Number of rounds that are timed even if they take longer than `_ROUNDS_S`."""
_LEAST_ROUNDS = 15
"""Number of rounds before the intervals of the ratios can end them."""
_PRECISE = 0.004
"""Half width of an interval at which a ratio is precise."""
_WARM_MS = 200.0
"""Milliseconds of samples that warm the GPU up before the first round."""
_QUEUE_AHEAD_CYCLES = 300_000
"""GPU cycles of the kernel that keeps the GPU busy while the host queues a sample."""
_L2_MULTIPLE = 4
"""The input sets of a cold policy hold at least so many times the bytes of the L2."""
_MOST_SETS = 8192
"""Largest number of input sets. A sample walks over all sets, and the capture of a longer walk takes many seconds."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Hold the settings of a time measurement; records and the cache identify a time by its policy."""

    name: str
    graph: bool
    cold: bool


POLICIES = {p.name: p for p in (Policy("cold", True, True), Policy("hot", True, False), Policy("eager", False, True))}


def num_input_sets(policy: Policy, set_bytes: int, l2_bytes: int, free_bytes: int) -> int:
    """Return the number of input/output sets with which every call finds the L2 cold.

    The sets hold at least four times the size of the L2, and a further set if it fits. At most half the free memory is used. The
    hot policy takes a single set.

    Raises:
        SkippedError: the sets do not fit in half the free memory, or their number exceeds `_MOST_SETS`.
    """
    if not policy.cold:
        return 1
    least = max(1, math.ceil(_L2_MULTIPLE * l2_bytes / max(set_bytes, 1)))
    num_fitting = max(1, free_bytes // (2 * max(set_bytes, 1)))
    if least > min(num_fitting, _MOST_SETS):
        limit = f"more than {_MOST_SETS:,}" if least > _MOST_SETS else f"half of the free memory holds {num_fitting:,}"
        raise SkippedError(f"a cold L2 takes {least:,} input sets of {set_bytes:,} bytes, {limit}: only policy hot can time it")
    return min(least + 1, num_fitting)


class Contender:
    """Time `calls` calls that walk over `sets` input sets, as a single CUDA graph or as eager launches.

    `run` takes the number of an input set and returns the outputs of a call. The outputs of a set live until the next call on
    the set, so that outputs rotate as inputs do. `after` takes the number of calls and enqueues further work of the sample
    behind the last call.
    """

    def __init__(
        self,
        run: Callable[[int], Any],
        sets: int,
        policy: Policy,
        sample_us: float = _MIN_SAMPLE_US,
        after: Callable[[int], None] | None = None,
    ) -> None:
        self.run, self.sets, self.policy, self.after = run, sets, policy, after
        self._outputs: list[Any] = [None] * sets
        self.calls = sets  # for the first walk, whose time tells how many calls a sample has
        self._walk()  # compiles, and fills the caches that a capture may not fill
        torch.cuda.synchronize()
        self._graph: torch.cuda.CUDAGraph | None = None
        time_us = self._timed_us()
        enough = sample_us / max(time_us, 0.5)
        rounds = max(enough, min(_MIN_CALLS, _LONG_SAMPLES * enough)) / sets
        self.calls = sets * max(1, math.ceil(rounds))
        self._graph = self._capture() if policy.graph else None
        self.sample_us()

    def _walk(self) -> None:
        for i in range(self.calls):
            self._outputs[i % self.sets] = None
            self._outputs[i % self.sets] = self.run(i % self.sets)
        if self.after is not None:
            self.after(self.calls)

    def _capture(self) -> torch.cuda.CUDAGraph:
        self._outputs = [None] * self.sets
        graph, generator = torch.cuda.CUDAGraph(), torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.clone_state()
        try:
            with torch.cuda.graph(graph):
                self._walk()
        except Exception as error:  # torch, the driver and the called code raise errors of their own
            generator.graphsafe_set_state(state)  # as a failed capture leaves it unable to draw numbers
            if out_of_memory_reason(error):
                raise
            raise RuntimeError(why_no_graph(error)) from error
        return graph

    def enqueue(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Enqueue a sample between two events."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        (self._graph.replay if self._graph else self._walk)()
        end.record()
        return start, end

    def sample_us(self) -> float:
        """Take a sample; return the microseconds per call."""
        sleep_on_gpu(_QUEUE_AHEAD_CYCLES)
        return self._timed_us()

    def _timed_us(self) -> float:
        start, end = self.enqueue()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / self.calls


def why_no_graph(error: BaseException) -> str:
    """Return the cause of a failed capture, a call that waits for the GPU or copies to it, and the policy without a graph."""
    *_, first = causes(error)
    return f'{statement_in("", first)}no CUDA graph can hold it, policy="eager" times each launch: {first_line(first)}'


def interleave(
    contenders: Mapping[str, Contender],
    *,
    max_rounds: int = 60,
    seed: int = 0,
    throttled: Callable[[], bool] = lambda: False,
) -> dict[str, Samples]:
    """Time all contenders in every round, in a new random order, until the ratios to the first contender are precise.

    Rounds stop when the interval of every ratio is narrower than ±`_PRECISE`, at `max_rounds`, or after `_ROUNDS_S`. A round in
    which `throttled()` returns true is repeated, at most `max_rounds` times in all.

    Returns:
        For each contender an array (rounds,) of microseconds per call, paired by round.
    """
    names = list(contenders)
    rng = random.Random(seed)
    times: dict[str, list[float]] = {name: [] for name in names}
    warm = 0.0
    while warm < _WARM_MS:
        warm += sum(c.sample_us() * c.calls for c in contenders.values()) / 1e3
    discarded, started = 0, time.monotonic()
    while len(times[names[0]]) < max_rounds:
        order = rng.sample(names, len(names))
        sleep_on_gpu(_QUEUE_AHEAD_CYCLES)
        events = {name: contenders[name].enqueue() for name in order}
        torch.cuda.synchronize()
        if throttled() and discarded < max_rounds:
            discarded += 1
            continue
        for name, (start, end) in events.items():
            times[name].append(start.elapsed_time(end) * 1e3 / contenders[name].calls)
        rounds = len(times[names[0]])
        if rounds >= _LEAST_ROUNDS and rounds % 5 == 0 and _are_precise(times):
            break
        if rounds >= _FEWEST_ROUNDS and time.monotonic() - started > _ROUNDS_S:
            break
    return {name: np.asarray(values) for name, values in times.items()}


def throttled() -> bool:
    """Return whether NVML reports that heat or the power brake slows the GPU now; false without NVML."""
    import pynvml

    try:
        return device.slowed_down(pynvml.nvmlDeviceGetCurrentClocksEventReasons(device.nvml_handle()))
    except pynvml.NVMLError:
        return False


def _are_precise(times: Mapping[str, list[float]]) -> bool:
    """Return whether the interval of every ratio to the first contender is narrow."""
    first, *others = (np.asarray(values) for values in times.values())
    return all(ratio_interval(first, other).relative_half_width <= _PRECISE for other in others)
