"""Estimated times of tiled products, and defaults that are chosen by them.

A product runs in waves of programs, each of which takes step after step of k. What a GPU takes for a wave, a step and a byte is
fitted to measured times (tuning.estimating) and shipped with the rule of the GPU.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

_Rate = Annotated[float, Meta(ge=1e-6, le=1e9)]


class Speeds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Speeds of a GPU in the parts of a tiled product. Each rate is what it would reach if nothing else took time.

    Attributes:
        sms: SMs of the GPU.
        launch_us: of the launch.
        program_us: of a program before its first step and after its last.
        latency_us: from asking for the operands of a step until they are there.
        join_us: of the last of several programs that share a tile, which adds up the parts.
        read_tb_s: of all SMs together, into shared memory.
        multiply_tflops: of all tensor cores together, in 16 bits; twice as many in 8.
        memory_tb_s: of DRAM.
        cache_tb_s: of the L2 cache.
        parts_tb_s: of parts written and read again.
    """

    sms: Annotated[int, Meta(gt=0, lt=1 << 20)]
    launch_us: _Rate
    program_us: _Rate
    latency_us: _Rate
    join_us: _Rate
    read_tb_s: _Rate
    multiply_tflops: _Rate
    memory_tb_s: _Rate
    cache_tb_s: _Rate
    parts_tb_s: _Rate


class Work(NamedTuple):
    """Work of a config for a case.

    Attributes:
        steps: of k that a program takes.
        step_bytes: bytes of both operands that a step reads.
        step_flops: floating-point operations of a step, those in 8 bits counted half.
        ahead: steps whose operands are asked for before they are needed.
        programs: of the launch.
        resident: programs that fit on an SM.
        memory_bytes: bytes of operands and result, each once.
        cache_bytes: bytes of operands that all programs read.
        part_bytes: bytes of parts written and read again; 0 where no programs share a tile.
    """

    steps: Any
    step_bytes: Any
    step_flops: Any
    ahead: Any
    programs: Any
    resident: Any
    memory_bytes: Any
    cache_bytes: Any
    part_bytes: Any


def time_us(work: Work, speeds: Speeds) -> Any:
    """Return the estimated time in µs; arrays of what is estimated where the work holds arrays.

    Operands of later steps arrive while tensor cores work: of latency, reading and multiplying the longest counts most.
    """
    steps, step_bytes, step_flops, ahead, programs, resident, memory_bytes, cache_bytes, part_bytes = work
    sms = speeds.sms
    at_once = resident * sms
    waves = programs // at_once
    in_tail = -(-(programs - waves * at_once) // sms)
    read, multiply = step_bytes * sms / speeds.read_tb_s, step_flops * sms / speeds.multiply_tflops
    latency, shared = (speeds.latency_us / ahead) ** 4, ((read * read + multiply * multiply) * 1e-12) ** 2
    first = step_bytes * sms / speeds.memory_tb_s * 1e-6
    full = speeds.program_us + resident * first + steps * (latency + resident**4 * shared) ** 0.25
    tail = speeds.program_us + in_tail * first + steps * (latency + in_tail**4 * shared) ** 0.25
    computing = waves * full + (in_tail > 0) * tail
    memory, cache = memory_bytes / speeds.memory_tb_s, cache_bytes / speeds.cache_tb_s
    parts = (part_bytes > 0) * speeds.join_us + part_bytes * 1e-6 / speeds.parts_tb_s
    return speeds.launch_us + (computing * computing + (memory * memory + cache * cache) * 1e-12) ** 0.5 + parts


@dataclass(frozen=True)
class Estimated:
    """The default of a variant: of some configs the one of the least estimated time.

    Attributes:
        speeds: those of the GPU for which the default was made.
        offered: case -> the knobs of every config that is compared, in their order, and its work.
        work: (case, config) -> its work; None where no estimate is made of such configs.
        config: the config class.
        valid: as in spec.Variant.
    """

    speeds: Speeds
    offered: Callable[[Any], Iterable[tuple[tuple[Any, ...], Work]]]
    work: Callable[[Any, Any], Work | None]
    config: type[Any]
    valid: Callable[[Any, Any], str | None]

    def __call__(self, case: Any) -> Any:
        """Return the valid config of the least estimated time; None where none is valid."""
        return next(self.ranked(case), None)

    def ranked(self, case: Any) -> Iterator[Any]:
        """Yield the configs that are compared and valid, the one of the least estimated time first."""
        speeds = self.speeds
        times = sorted([(time_us(work, speeds), knobs) for knobs, work in self.offered(case)], key=itemgetter(0))
        for _, knobs in times:
            config = self.config(*knobs)
            if self.valid(case, config) is None:
                yield config

    def told(self, case: Any, config: Any) -> str:
        """Return in words what a config does for a case, and how long by estimate; empty where no estimate is made."""
        work = self.work(case, config)
        if work is None:
            return ""
        at_once = work.resident * self.speeds.sms
        waves = -(-work.programs // at_once)
        parts = f", whose parts are {work.part_bytes / 1e6:.1f} MB" if work.part_bytes else ""
        what = f"{work.programs} programs{parts}, {at_once} at once: {waves} {'wave' if waves == 1 else 'waves'}"
        return f"{time_us(work, self.speeds):.1f} µs: {what} of {work.steps} {'step' if work.steps == 1 else 'steps'} of k"


def with_speeds(default: Any, speeds: Speeds | None) -> Any:
    """Return the default as it is chosen on a GPU of other speeds; unchanged where it is not estimated, or without speeds."""
    return replace(default, speeds=speeds) if speeds is not None and isinstance(default, Estimated) else default
