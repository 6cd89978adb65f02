"""Sort (token, choice) pairs by expert with counts: three launches, stable, no atomics.

Pairs are numbered token * K + choice. A block is BLOCK pairs that follow each other.
"""

import triton
import triton.language as tl


@triton.jit
def _experts_of(ids_ptr, pair, pairs, E: tl.constexpr):
    """Return the expert of each pair as int32; -1 for an id outside [0, E), which int32 may not hold."""
    ids = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, -1).to(tl.int32)


@triton.jit
def count_pairs(ids_ptr, counts_ptr, pairs, E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write counts (blocks, E): how many pairs of each block chose each expert."""
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    chosen = _experts_of(ids_ptr, pair, pairs, E)
    counts = tl.histogram(tl.where(chosen >= 0, chosen, EXPERTS - 1), EXPERTS)  # pairs of no expert in the last bin, past E
    experts = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + block * E + experts, counts, mask=experts < E)


@triton.jit
def sum_blocks(counts_ptr, totals_ptr, blocks, E: tl.constexpr, BLOCKS: tl.constexpr):
    """Replace each count of an expert by the sum over all earlier blocks, and write its total; one program per expert."""
    expert = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    counts = tl.load(counts_ptr + block * E + expert, mask=block < blocks, other=0)
    sums = tl.cumsum(counts, axis=0)
    tl.store(counts_ptr + block * E + expert, sums - counts, mask=block < blocks)
    tl.store(totals_ptr + expert, tl.sum(counts, axis=0))


@triton.jit
def place_pairs(
    ids_ptr, counts_ptr, totals_ptr, pairs_ptr, places_ptr, offs_ptr, pairs,
    E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the row of each pair (places), the pair of each row (pairs, -1 behind the last row), and each expert's end (offs)."""
    block = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    totals = tl.load(totals_ptr + experts, mask=experts < E, other=0)
    ends = tl.cumsum(totals, axis=0)
    if block == 0:
        tl.store(offs_ptr + experts, ends, mask=experts < E)
    lanes = tl.arange(0, BLOCK)
    pair = block * BLOCK + lanes
    chosen = _experts_of(ids_ptr, pair, pairs, E)
    routed = chosen >= 0
    before_in_block = tl.sum(((chosen[None, :] == chosen[:, None]) & (lanes[None, :] < lanes[:, None])).to(tl.int32), axis=1)
    in_earlier_blocks = tl.load(counts_ptr + block * E + chosen, mask=routed, other=0)
    place = in_earlier_blocks + before_in_block + tl.gather(ends - totals, tl.where(routed, chosen, 0), axis=0)
    tl.store(places_ptr + pair, tl.where(routed, place, -1), mask=pair < pairs)
    tl.store(pairs_ptr + place, pair, mask=routed)
    tl.store(pairs_ptr + pair, tl.zeros_like(pair) - 1, mask=(pair < pairs) & (pair >= tl.sum(totals, axis=0)))
