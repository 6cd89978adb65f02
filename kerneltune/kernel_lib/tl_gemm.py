"""Device code that matrix products share: a product of tiles, and a contraction that several programs share.

Every program leaves its part in fp32; one adds the parts in the order of the contraction, so that equal inputs give equal bits:
the last to arrive at a tile, or one that waits for the others. Launches nothing. May import triton and tl_lib.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

from kerneltune.kernel_lib.tl_lib import INTERPRETED, is_cuda

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


@triton.constexpr_function
def _waiting(parts, at_once):
    """PTX that waits until `at_once` words of each part are there, leaves zeros and adds up. Operands: pointers, whether to,
    bytes from part to part, the last summands."""
    each = range(at_once)
    words = [f"w{part}_{i}" for part in range(parts) for i in each]
    lines = ["{", ".reg .pred p;", ".reg .b32 least;"]
    lines += [f".reg .pred p{i}; setp.ne.b32 p{i}, ${2 * at_once + i}, 0;" for i in each]
    lines += [f".reg .b32 {w}; .reg .b64 at_{w}; mov.b32 {w}, -1;" for w in words]
    lines += [f"mov.b64 at_w0_{i}, ${at_once + i};" for i in each]
    lines += [f"add.s64 at_w{p}_{i}, at_w{p - 1}_{i}, ${3 * at_once};" for p in range(1, parts) for i in each]
    lines += ["AGAIN_${:uid}:", *(f"@p{w[-1]} ld.relaxed.gpu.global.b32 {w}, [at_{w}];" for w in words)]
    lines += [f"mov.b32 least, {words[0]};", *(f"min.u32 least, least, {w};" for w in words[1:])]
    lines += ["setp.eq.b32 p, least, 0;", "@p bra AGAIN_${:uid};"]
    lines += [f"@p{w[-1]} st.global.b32 [at_{w}], 0; not.b32 {w}, {w};" for w in words]
    lines += [f"mov.b32 ${i}, w0_{i};" for i in each]
    lines += [f"add.rn.f32 ${i}, ${i}, w{p}_{i};" for p in range(1, parts) for i in each]
    lines += [f"add.rn.f32 ${i}, ${i}, ${4 * at_once + i};" for i in each]
    return "\n".join([*lines, "}"])


@triton.constexpr_function
def _operands_of_waiting(at_once):
    return ",".join(kind for kind in ("=&f", "l", "r", "l", "f") for _ in range(at_once))


@triton.jit
def with_parts(word_ptrs, stride, part, mask, PARTS: tl.constexpr):
    """The sum of the fp32 tiles left at word_ptrs, word_ptrs + stride, …, in this order, and last of this program's own.

    Every thread waits for its own words, which no other must have, and leaves zeros. The other programs must have begun before
    this one: on NVIDIA's GPUs those of smaller ids, for programs begin in that order; it is what they do, not what CUDA promises.
    For CUDA and the interpreter alone.
    """
    if is_cuda():
        tl.static_assert(part.numel >= num_threads())
        AT_ONCE: tl.constexpr = min(8 if PARTS < 8 else 4, part.numel // num_threads())  # each word takes three registers
        addresses = word_ptrs.to(tl.int64)
        # called pure so that the copy of another layout, which nothing uses, is dropped; a test counts that one is left
        return tl.inline_asm_elementwise(
            _waiting(PARTS, AT_ONCE), _operands_of_waiting(AT_ONCE),
            [addresses, mask.to(tl.int32), tl.zeros_like(addresses) + stride * 4, part],
            dtype=tl.float32, is_pure=True, pack=AT_ONCE)  # fmt: skip
    total = tl.zeros_like(part)
    for other in tl.static_range(PARTS):
        words = tl.load(word_ptrs + other * stride, mask=mask, other=-1)
        total += (words ^ -1).to(tl.float32, bitcast=True)
        tl.store(word_ptrs + other * stride, tl.zeros_like(part).to(tl.int32), mask=mask)
    return total + part
