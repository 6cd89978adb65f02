"""Device code that matrix products share: a product of tiles, and a contraction that several programs share.

Every program leaves its part in fp32; one adds the parts in the order of the contraction, so that equal inputs give equal bits:
the last to arrive at a tile, or one that waits for the others. Launches nothing. May import triton and tl_lib.
"""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_lib import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc):
    """acc + a b, in fp32. Triton's interpreter multiplies the bits of bf16 as integers (3.7.1), so it gets fp32."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def is_last(counter_ptr, parts):
    """Count this program in at a word that is zero between launches, after all that its threads stored; whether it is the last
    of `parts`.

    If it is, what the others stored can be read from L2.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def sum_of_parts(part_ptr, stride, mask, PARTS: tl.constexpr):
    """The sum of the fp32 tiles at part_ptr, part_ptr + stride, …, in this order."""
    total = tl.load(part_ptr, mask=mask, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        total += tl.load(part_ptr + part * stride, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def leave_part(word_ptrs, part, mask):
    """Store an fp32 tile in words that are zero between launches, for the program that waits in `with_parts`. No such word is 0:
    its bits are turned, and a NaN of ones alone becomes another."""
    bits = part.to(tl.int32, bitcast=True)
    tl.store(word_ptrs, tl.where(bits == -1, 0x7FFFFFFF, bits) ^ -1, mask=mask, cache_modifier=".cg")


@triton.jit
def with_parts(word_ptrs, stride, part, mask, PARTS: tl.constexpr):
    """The sum of the fp32 tiles left at word_ptrs, word_ptrs + stride, …, in this order, and last of this program's own.

    Waits for the others, word by word, and leaves zeros. They must have begun before this one: on NVIDIA's GPUs those of smaller
    ids, for programs begin in that order; it is what they do, not what CUDA promises. For CUDA and the interpreter alone.
    """
    total = part
    missing = 1
    while missing != 0:
        is_missing = tl.zeros_like(part).to(tl.int32)
        for other in tl.static_range(PARTS):
            words = tl.load(word_ptrs + other * stride, mask=mask, other=-1, volatile=True)
            is_missing |= (words == 0).to(tl.int32)
            value = (words ^ -1).to(tl.float32, bitcast=True)
            if other == 0:
                total = value
            else:
                total += value
        missing = tl.max(is_missing)
    for other in tl.static_range(PARTS):
        tl.store(word_ptrs + other * stride, tl.zeros_like(part).to(tl.int32), mask=mask)
    return total + part
