"""Device code that matrix products share: a product of tiles, and a contraction that several programs share.

Every program leaves its part in fp32; the last to arrive at a tile adds the parts in the order of the contraction, so that
equal inputs give equal bits. Launches nothing. May import triton and tl_lib.
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
