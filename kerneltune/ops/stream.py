"""Read and write streams: the ceiling of memory-bound operators.

Reads `read` bytes and writes `write` bytes, every byte once, and computes an exclusive or alone. Tuned like any other
operator, its time is the least in which this GPU moves so many bytes at this mix of reads and writes. Source: kerneltune.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce

import torch
import triton
import triton.language as tl

from kerneltune.device import sm_count
from kerneltune.kernel_lib.agreement import all_same_bits
from kerneltune.kernel_lib.check_values import draw
from kerneltune.kernel_lib.functions import constant
from kerneltune.kernel_lib.tl_lib import wide
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """Config of a streaming kernel.

    Attributes:
        block: 32-bit words per load.
        warps: warps of a program.
        ctas: programs per SM; 0 for a program per block.
    """

    block: int
    warps: int
    ctas: int


_MOST_READS = 16
_MOST_FOLDED = 256
"""Most loads that are unrolled for a store, and most words that are folded to a word where an operator reads more: unrolled,
they would be thousands of loads."""


def invalid(_case: Case, config: StreamConfig) -> str | None:
    """Refuse less than a 16-byte load per thread, and more than four."""
    words = config.block // (32 * config.warps)
    return None if 4 <= words <= 16 else f"{words} words per thread"


def mix(read: int, write: int) -> tuple[int, int, int]:
    """Return the read:write ratio as small integers and a power of two: (2, 1, 1) is 2:1, (8, 1, 16) is 128:1."""
    ratio = Fraction(read, write).limit_denominator(4)
    if ratio <= _MOST_READS:
        return max(1, ratio.numerator), ratio.denominator, 1
    reads = _MOST_READS // 2
    return reads, 1, min(_MOST_FOLDED, 1 << round(math.log2(ratio / reads)))


@triton.jit
def _stream(src_ptr, dst_ptr, words, READS: tl.constexpr, WRITES: tl.constexpr, FOLD: tl.constexpr, BLOCK: tl.constexpr):
    for block in tl.range(tl.program_id(0), tl.cdiv(words, BLOCK), tl.num_programs(0)):
        offsets = wide(block) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < words
        word = tl.zeros((BLOCK,), dtype=tl.int32)
        for stream in tl.static_range(READS):
            word ^= tl.load(src_ptr + stream * wide(words) + offsets, mask=mask, other=0, eviction_policy="evict_first")
        if FOLD > 1:
            word = tl.xor_sum(tl.reshape(word, (BLOCK // FOLD, FOLD)), axis=1)
            offsets = wide(block) * (BLOCK // FOLD) + tl.arange(0, BLOCK // FOLD)
            mask = offsets < words // FOLD
        for stream in tl.static_range(WRITES):
            tl.store(dst_ptr + stream * wide(words // FOLD) + offsets, word, mask=mask, cache_modifier=".cs")


def stream(src: torch.Tensor, writes: int, fold: int, config: StreamConfig) -> torch.Tensor:
    """Write the exclusive or of the rows of src and of `fold` neighbours, `writes` times.

    Args:
        src: (reads, words) int32, words a multiple of fold.
        fold: a power of two.

    Returns:
        (writes, words // fold) int32.
    """
    reads, words = src.shape
    dst = src.new_empty((writes, words // fold))
    blocks = cdiv(words, config.block)
    grid = min(blocks, config.ctas * sm_count(src.device.type, src.device.index)) if config.ctas else blocks
    _stream[(grid,)](src, dst, words, READS=reads, WRITES=writes, FOLD=fold, BLOCK=config.block, num_warps=config.warps)
    return dst


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw src (reads, words) int32 of `read` bytes in all, how many rows to write, and how many words to fold to a word."""
    reads, writes, fold = mix(case["read"], case["write"])
    src = draw("random_", (reads, _words(case)), torch.int32, device, seed, 0, 1 << 30)
    return {"src": src, "writes": writes, "fold": fold}


def reference(inputs: Inputs) -> Outputs:
    """Return the exclusive or of the rows and of neighbours, `writes` times."""
    word = reduce(torch.bitwise_xor, inputs["src"].unbind(0))
    return {"dst": reduce(torch.bitwise_xor, word.view(-1, inputs["fold"]).unbind(1)).expand(inputs["writes"], -1)}


def traffic(case: Case) -> Traffic:
    """Return the bytes of the tensors: the case's, rounded to whole words of the mix."""
    reads, writes, fold = mix(case["read"], case["write"])
    words = _words(case)
    return Traffic(4 * reads * words, 4 * writes * words // fold)


def _words(case: Case) -> int:
    reads, _, fold = mix(case["read"], case["write"])
    return max(1, case["read"] // (4 * reads * fold)) * fold


def run(inputs: Inputs, config: StreamConfig) -> Outputs:
    """Run `stream` on a case's inputs."""
    return {"dst": stream(inputs["src"], inputs["writes"], inputs["fold"], config)}


_SPACE = constant({"block": (512, 1024, 2048, 4096), "warps": (4, 8), "ctas": (0, 8)})
"""Loads of four to sixteen words per thread, a program per block or a loop over blocks."""
OP = Op(
    name="stream",
    axes=("read", "write"),
    free_axes=("read", "write"),
    dtypes=("int32",),
    inputs=inputs,
    reference=reference,
    compare=all_same_bits,
    traffic=traffic,
    variants=(Variant("baseline", run, StreamConfig, _SPACE, invalid, constant(StreamConfig(block=1024, warps=8, ctas=0))),),
    module=__name__,
)
