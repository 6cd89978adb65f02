"""Estimate the time of a product with tokens in e4m3, by which `fp8_gemm.default` chooses.

A program takes steps of 128 k. An SM runs its programs in waves of at most `HELD`. A step of a wave takes as long as a program
waits, or as long as the shares of all programs take together, whichever is longer.
"""

from collections.abc import Mapping
from math import cbrt
from typing import NamedTuple

HELD: Mapping[tuple[int, int], int] = {
    (16, 1): 8, (16, 2): 5, (32, 1): 7, (32, 2): 4, (64, 1): 4, (64, 2): 2, (128, 1): 3, (128, 2): 1
}  # fmt: skip
"""Programs that an SM holds, by rows of x and blocks of rows of w of a program: its registers allow no more (`inspect
int4_fp8_gemm`, sm_90). Programs of 64 and more rows of x and two blocks have eight warps, because four spare no register."""
SMS = 132
"""SMs of an H100 and an H200."""


class StepTimes(NamedTuple):
    """Hold the times that an estimate is made of, in µs.

    Attributes:
        wait: a step of a program that is alone on an SM: its instructions wait for each other, for copies and for wgmma.
        warpgroup: share of the SM's time that a step takes for each four warps.
        block: share for each block of 64 rows of w: codes become e4m3, sums of a group are scaled, wgmma.
        element: share for each block and row of x.
        absent: share for each row of x past the last token, which TMA fills with zeros.
        part: adding up the part of another split, for each block and row of x.
        store: end of a program, for each block and row of x.
        wait_again, block_again: how much longer a step waits and takes for each group of k but the first.
    """

    wait: float = 0.4016
    warpgroup: float = 0.0378
    block: float = 0.0939
    element: float = 0.0006
    absent: float = 0.0061
    part: float = 0.00835
    store: float = 0.01754
    wait_again: float = 0.243
    block_again: float = 0.3


TIMES = StepTimes()
"""Fitted to 1,632 times of an H100 and an H200, 2026-11-26. `python benchmarks/fit_int4_estimate.py` fits them anew."""


def warps_of(tokens: int, blocks: int) -> int:
    """Return the warps of a program of these rows of x and blocks of rows of w."""
    return 8 if blocks == 2 and tokens >= 64 else 4


class StepCost(NamedTuple):
    """Hold the cost of the steps of a program's shape, for `sm_us`.

    Attributes:
        held: programs that an SM holds at once.
        wait, share: cubes of the µs that a step waits, and that it takes of the SM.
        part: µs to add up the part of another split.
        store: µs of a program's end.
    """

    held: int
    wait: float
    share: float
    part: float
    store: float


def step_cost(tokens: int, blocks: int, present: float, groups: int, t: StepTimes = TIMES) -> StepCost:
    """Return the cost of the steps of programs of a shape.

    Args:
        tokens: rows of x of a step.
        blocks: blocks of rows of w of a program.
        present: rows of x of a step that are tokens, on average.
        groups: groups of k of a step.
        t: times that the estimate is made of.
    """
    wait = t.wait * (1 + t.wait_again * (groups - 1))
    share = t.warpgroup * warps_of(tokens, blocks) / 4 + blocks * (t.block + t.element * tokens)
    share *= 1 + t.block_again * (groups - 1)
    absent, elements = t.absent * (tokens - present), tokens * blocks
    return StepCost(HELD[tokens, blocks], wait**3, share**3 + absent**3, t.part * elements, t.store * elements)


def sm_us(cost: StepCost, programs: int, steps: int, splits: int = 1) -> float:
    """Estimate how long an SM takes for its programs of so many steps, which share rows of w with programs of other splits.

    A step takes the longer of the wait and of all shares, and more where both are equal: the cube root of the sum of their cubes.
    """
    held, wait, share, part, store = cost
    if programs <= held:
        steps_us = cbrt(wait + programs**3 * share)
    else:
        waves, rest = divmod(programs, held)
        steps_us = waves * cbrt(wait + held**3 * share) + (cbrt(wait + rest**3 * share) if rest else 0)
    return steps * steps_us + (splits - 1) * part + programs * store
