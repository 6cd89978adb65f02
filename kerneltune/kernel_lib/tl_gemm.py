"""Device code that matrix products share: a product of tiles, and a contraction that several programs share.

Programs leave their parts in fp32. The last program to arrive at a tile, or a program that waits for all parts, adds them in the
order of the contraction, so that equal inputs give equal bits. Launches nothing. May import triton and tl_lib.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import num_threads

from kerneltune.kernel_lib.tl_lib import INTERPRETED, is_cuda

_INTERPRETED = tl.constexpr(INTERPRETED)
_WORDS_WAITED_FOR = 48
"""Most words that a thread loads before it checks whether all have arrived; each word takes a register."""


@triton.jit
def dot(a, b, acc):
    """Return `acc` with the product of a tile's rows added."""
    if _INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def is_last(counter_ptr, parts):
    """Add 1 to a counter after all stores of this program; return whether it is the last of `parts` programs.

    The counter is zero between launches. The last program can read from L2 the values that all other programs stored.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def sum_of_parts(part_ptr, stride, mask, PARTS: tl.constexpr):
    """Sum the fp32 tiles at part_ptr, part_ptr + stride, …, in this order."""
    total = tl.load(part_ptr, mask=mask, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        total += tl.load(part_ptr + part * stride, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def gather_parts(tile_ptr, stride, split, part, SPLITS: tl.constexpr):
    """Give the last of programs 0 … SPLITS - 1 the sum of their fp32 tiles, in this order.

    All other programs store their tiles in words that are zero between launches: SPLITS - 1 tiles from tile_ptr on, stride words
    apart. A stored word is never 0: its bits are inverted, and a NaN with all bits set is replaced by another NaN. The waiting
    program resets the word to zero. Every thread has words of its own in every tile, and the words of a warp lie side by side:
    only the same thread of the programs that share a word knows its element. So storing and waiting are one piece of PTX: of
    two pieces the compiler might give a thread different elements. The result of all other programs means nothing, but they
    must use it, because the compiler drops code without a use.

    All other programs must have begun before the last: NVIDIA's GPUs begin programs in the order of their ids, although CUDA does
    not promise it. For CUDA and the interpreter alone.
    """
    if is_cuda():
        tl.static_assert(part.numel >= num_threads())
        EACH: tl.constexpr = part.numel // num_threads()
        zeros = tl.zeros_like(part).to(tl.int32)
        operands = [tl.cast(tile_ptr, tl.int64) + zeros, tl.cast(stride, tl.int64) * 4 + zeros, split + zeros, part]
        # called pure so that the copy of another layout, which nothing uses, is dropped; a test counts the copies that are left
        return tl.inline_asm_elementwise(
            _gather_ptx(SPLITS - 1, EACH, num_threads()), _constraints(EACH), operands, dtype=tl.float32, is_pure=True, pack=EACH
        )
    rows, columns = tl.arange(0, part.shape[0]), tl.arange(0, part.shape[1])
    word_ptrs = tile_ptr + (rows[:, None] * part.shape[1] + columns[None, :])
    if split < SPLITS - 1:
        words = part.to(tl.int32, bitcast=True) ^ -1
        tl.store(word_ptrs + split * stride, tl.where(words == 0, 1, words))  # unordered: a word that is not 0 was stored
        return part
    total = tl.zeros_like(part)
    for other in tl.static_range(SPLITS - 1):
        total += (tl.load(word_ptrs + other * stride) ^ -1).to(tl.float32, bitcast=True)  # unordered: see the store
        tl.store(word_ptrs + other * stride, tl.zeros_like(part).to(tl.int32))  # unordered: its writer has ended
    return total + part


@triton.constexpr_function
def _constraints(each):
    return ",".join(kind for kind in ("=&f", "l", "l", "r", "f") for _ in range(each))


@triton.constexpr_function
def _gather_ptx(others, each, threads):
    """Return the PTX of `gather_parts`, for `each` values of a thread: program `others`, the last, waits for all other programs.

    Operands, `each` of a kind: sums; address of the first tile, bytes from tile to tile, number of this program, values.
    """
    at_once = min(each, 4)  # words of an instruction
    vector = f".v{at_once}" if at_once > 1 else ""
    batch = max(at_once, min(each, _WORDS_WAITED_FOR // others // at_once * at_once))
    sums, numbers = [f"${i}" for i in range(each)], [f"${4 * each + i}" for i in range(each)]

    def group(words):
        return f"{{{', '.join(words)}}}"

    def at(tile, i):
        return f"[at{tile}+{4 * i * threads}]"

    lines = ["{", ".reg .pred p; .reg .b32 thread, least; .reg .b64 at0, mine;"]
    lines += ["mov.u32 thread, %tid.x;", f"mul.wide.u32 at0, thread, {4 * at_once}; add.s64 at0, at0, ${each};"]
    lines += [f"setp.eq.s32 p, ${3 * each}, {others};", "@p bra WAIT_${:uid};"]

    lines += [f"cvt.s64.s32 mine, ${3 * each}; mad.lo.s64 at0, mine, ${2 * each}, at0;"]
    lines += [
        f".reg .b32 left{i}; mov.b32 left{i}, {n}; not.b32 left{i}, left{i}; max.u32 left{i}, left{i}, 1;"
        for i, n in enumerate(numbers)
    ]
    for i in range(0, each, at_once):
        lines += [f"st.relaxed.gpu.global{vector}.b32 {at(0, i)}, {group([f'left{j}' for j in range(i, i + at_once)])};"]
    lines += [f"mov.f32 {total}, {n};" for total, n in zip(sums, numbers, strict=True)]
    lines += ["bra.uni DONE_${:uid};", "WAIT_${:uid}:"]

    lines += [f".reg .b64 at{tile}; add.s64 at{tile}, at{tile - 1}, ${2 * each};" for tile in range(1, others)]
    lines += [f".reg .b32 w{tile}_{i};" for tile in range(others) for i in range(batch)]
    for first in range(0, each, batch):
        count = min(batch, each - first)
        words = [[f"w{tile}_{i}" for i in range(count)] for tile in range(others)]
        groups = [(tile, i) for tile in range(others) for i in range(0, count, at_once)]
        lines += [f"AGAIN{first}_${{:uid}}:"]
        lines += [f"ld.relaxed.gpu.global{vector}.b32 {group(words[t][i : i + at_once])}, {at(t, first + i)};" for t, i in groups]
        every = [w for of_tile in words for w in of_tile]
        lines += [f"mov.b32 least, {every[0]};", *(f"min.u32 least, least, {w};" for w in every[1:])]
        lines += ["setp.eq.b32 p, least, 0;", f"@p bra AGAIN{first}_${{:uid}};"]
        lines += [f"st.relaxed.gpu.global{vector}.b32 {at(t, first + i)}, {group(['0'] * at_once)};" for t, i in groups]
        lines += [f"not.b32 {w}, {w};" for w in every]
        for i in range(count):
            total, number = sums[first + i], numbers[first + i]
            lines += [f"mov.b32 {total}, w0_{i};", *(f"add.rn.f32 {total}, {total}, w{t}_{i};" for t in range(1, others))]
            lines += [f"add.rn.f32 {total}, {total}, {number};"]
    return "\n".join([*lines, "DONE_${:uid}:", "}"])
