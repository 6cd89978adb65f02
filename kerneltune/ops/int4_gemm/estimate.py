"""Estimate the time of a product with tokens in e4m3, by which the default of `fp8_gemm` chooses.

A program takes steps of 128 k. An SM runs at most `HELD` programs at once. A step of all of them takes as long as a program
waits, or as long as the shares of all programs take together, whichever is longer. All steps take at least as long as the reads
of the programs do, from memory and from L2.
"""

from collections.abc import Mapping
from math import sqrt
from typing import NamedTuple

from kerneltune.device import current

HELD: Mapping[tuple[int, int], int] = {
    (16, 1): 8, (16, 2): 5, (32, 1): 7, (32, 2): 4, (64, 1): 4, (64, 2): 2, (128, 1): 3, (128, 2): 1
}  # fmt: skip
"""Programs that an SM holds, by rows of x and blocks of rows of w of a program: its registers allow no more (`inspect
int4_fp8_gemm`, sm_90). Programs of 64 and more rows of x and two blocks have eight warps, because four spare no register."""
SMS = 132
"""SMs of an H100 and an H200, the default without a GPU."""


def sms() -> int:
    """Return the SMs of the GPU."""
    return current().sms if current().is_gpu else SMS


class StepTimes(NamedTuple):
    """Hold the times that an estimate is made of, in µs.

    Attributes:
        wait: a step of a program that is alone on an SM: its instructions wait for each other and for copies.
        product: further wait for wgmma, for each block of 64 rows of w and row of x.
        warpgroup: share of the SM's time that a step takes for each four warps.
        block: share for each block of 64 rows of w: codes become e4m3, sums of a group are scaled, wgmma.
        element: share for each block and row of x.
        absent: share for each row of x past the last token, which TMA fills with zeros.
        again: share by which a step takes longer for each group of k but the first.
        part: adding up the part of another split, for each block and row of x.
        store: end of a program, for each block and row of x.
        read: reading a block of 64 rows and 128 k of w from memory.
        cached: share of `read` that reading as many bytes from L2 takes.
    """

    wait: float = 0.366
    product: float = 0.0006
    warpgroup: float = 0.0346
    block: float = 0.0858
    element: float = 0.0008
    absent: float = 0.0063
    again: float = 0.39
    part: float = 0.0088
    store: float = 0.0122
    read: float = 0.00126
    cached: float = 0.244


TIMES = StepTimes()
"""Fitted to 2,716 times of an H100, 2026-11-26. `python benchmarks/fit_int4_estimate.py` fits them anew."""


def warps_of(tokens: int, blocks: int) -> int:
    """Return the warps of a program of these rows of x and blocks of rows of w."""
    return 8 if blocks == 2 and tokens >= 64 else 4


class ShapeCost(NamedTuple):
    """Hold the costs of programs of a shape, for `product_us`. Powers are the fourth.

    Attributes:
        held: programs that an SM holds at once.
        wait, share: powers of the µs that a step waits, and that it takes of the SM.
        part: µs to add up the part of another split.
        store: µs of a program's end.
    """

    held: int
    wait: float
    share: float
    part: float
    store: float


def shape_cost(tokens: int, blocks: int, groups: int, absent: float = 0, t: StepTimes = TIMES) -> ShapeCost:
    """Return the costs of programs of a shape.

    Args:
        tokens: rows of x of a step.
        blocks: blocks of rows of w of a program.
        groups: groups of k of a step.
        absent: rows of x of a step past the last token, on average.
        t: times that the estimate is made of.
    """
    elements, again = tokens * blocks, 1 + t.again * (groups - 1)
    wait = again * (t.wait + t.product * elements)
    share = again * (t.warpgroup * warps_of(tokens, blocks) / 4 + t.block * blocks + t.element * elements)
    return ShapeCost(HELD[tokens, blocks], wait**4, share**4 + (t.absent * absent) ** 4, t.part * elements, t.store * elements)


def reads_us(depth: int, rows: float, rows_again: float, x_rows: float, t: StepTimes = TIMES) -> float:
    """Estimate how long the reads of all programs take, if nothing else does.

    Args:
        depth: blocks of k.
        rows: blocks of rows of w, which come from memory.
        rows_again: blocks of rows of w that programs of further tokens read, from L2.
        x_rows: rows of x that all programs read, from L2; 32 rows have the bytes of a block of w.
        t: times that the estimate is made of.
    """
    return t.read * depth * (rows + t.cached * (rows_again + x_rows / 32))


def product_us(cost: ShapeCost, programs: int, steps: float, reads: float, splits: int = 1) -> float:
    """Estimate how long a product takes without its begin.

    Times that overlap are combined by the fourth root of the sum of their fourth powers: about the longest, and 19 % more than
    the longest where two are equal.

    Args:
        cost: costs of the programs.
        programs: programs of an SM.
        steps: steps of a program.
        reads: result of `reads_us`.
        splits: programs that share rows of w.
    """
    held, wait, share, part, store = cost
    at_once = programs if programs < held else held
    times = steps * programs / at_once
    square, squares, reads = at_once * at_once, times * times, reads * reads  # because powers are slow
    overlapped = sqrt(sqrt(squares * squares * (wait + square * square * share) + reads * reads))
    return overlapped + (splits - 1) * part + programs * store
