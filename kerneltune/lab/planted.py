"""One variant timed against itself and against itself made slower by a known part, in one interleaved run.

The delay is a kernel that spins on the device, once per sample behind the last call: as long as the planted part of all calls
of the sample, so that kernels of a few µs can be delayed by 2 %. Judges nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from kerneltune.measuring.check import OutOfMemory, affordable
from kerneltune.measuring.compare import (
    SELF,
    contender,
    input_sets,
    make_record,
    noise_floor,
    obstacle,
    time_contenders,
    timing,
)
from kerneltune.measuring.rounds import POLICIES, Contender
from kerneltune.records import Record
from kerneltune.search.task import Task
from kerneltune.spec import Config
from kerneltune.stats import Samples

_SPINS = (50_000, 500_000)
"""Cycles of the two spins that the clock is taken from."""
_SAMPLES = 9


def measure_planted(family: str, task: Task, config: Config, delays: Sequence[float]) -> dict[float, Record]:
    """Record this process once for every delay, a fraction of the time; 0.0 is the variant as it is.

    Empty where the variant cannot run the case or the case cannot be timed.
    """
    if task.variant.unsupported(task.case) is not None or obstacle(task) is not None:
        return {}
    samples = affordable(partial(_planted, task, config, delays))
    if isinstance(samples, OutOfMemory):
        return {}
    floor, traffic = noise_floor(samples), task.op.traffic(task.case).total
    records = {}
    for delay in (0.0, *delays):
        times = timing(samples[_name(delay)], traffic, None, floor)
        records[delay] = make_record(family, task, config, "passed", "", **times)
    torch.cuda.empty_cache()
    return records


def _planted(task: Task, config: Config, delays: Sequence[float]) -> dict[str, Samples] | OutOfMemory:
    variant, policy, inputs = task.variant, POLICIES[task.policy], input_sets(task)
    if isinstance(inputs, OutOfMemory):
        return inputs
    plain = contender(variant, config, inputs, policy)
    contenders = {_name(0.0): plain, SELF: contender(variant, config, inputs, policy)}
    time_us, spin = _median_us(plain), _spinner()
    for delay in delays:
        contenders[_name(delay)] = contender(variant, config, inputs, policy, after=partial(spin, delay * time_us))
    return time_contenders(contenders)


def _name(delay: float) -> str:
    return f"{delay:+.2%}"


def _spinner() -> Callable[[float, int], None]:
    """Return what enqueues a spin of so many µs a call for so many calls, its launch within a graph included."""
    short, long = (_median_us(Contender(partial(_sleep, cycles), 1, POLICIES["hot"])) for cycles in _SPINS)
    us_per_cycle = (long - short) / (_SPINS[1] - _SPINS[0])
    launch_us = short - us_per_cycle * _SPINS[0]
    return lambda us, calls: torch.cuda._sleep(max(1, round((us * calls - launch_us) / us_per_cycle)))


def _sleep(cycles: int, _set: int) -> None:
    torch.cuda._sleep(cycles)


def _median_us(timed: Contender) -> float:
    return float(np.median([timed.sample_us() for _ in range(_SAMPLES)]))
