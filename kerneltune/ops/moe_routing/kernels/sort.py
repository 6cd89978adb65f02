"""Sort (token, choice) pairs by expert with counts: three launches, stable, no atomics.

Pairs are numbered token * K + choice. A block is BLOCK pairs that follow each other.
"""

import triton
import triton.language as tl


@triton.jit
def _experts_of(ids_ptr, at, pairs, E: tl.constexpr):
    """Return the expert of each pair as int32; -1 for an id outside [0, E), which int32 may not hold."""
    ids = tl.load(ids_ptr + at, mask=at < pairs, other=-1)
    return tl.where((ids >= 0) & (ids < E), ids, -1).to(tl.int32)


@triton.jit
def count_pairs(ids_ptr, counts_ptr, pairs, E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write counts (blocks, E): how many pairs of each block chose each expert."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    chosen = _experts_of(ids_ptr, at, pairs, E)
    found = tl.histogram(tl.where(chosen >= 0, chosen, EXPERTS - 1), EXPERTS)  # EXPERTS is above E
    experts = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + block * E + experts, found, mask=experts < E)


@triton.jit
def sum_blocks(counts_ptr, totals_ptr, blocks, E: tl.constexpr, BLOCKS: tl.constexpr):
    """Replace each count of an expert by the sum over all earlier blocks, and write its total; one program per expert."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCKS)
    found = tl.load(counts_ptr + at * E + expert, mask=at < blocks, other=0)
    upto = tl.cumsum(found, axis=0)
    tl.store(counts_ptr + at * E + expert, upto - found, mask=at < blocks)
    tl.store(totals_ptr + expert, tl.sum(found, axis=0))


@triton.jit
def place_pairs(
    ids_ptr, counts_ptr, totals_ptr, pairs_ptr, places_ptr, offs_ptr, pairs,
    E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write where each pair goes, which pair each row is, -1 behind the last, and where each expert's rows end."""
    block = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    totals = tl.load(totals_ptr + experts, mask=experts < E, other=0)
    ends = tl.cumsum(totals, axis=0)
    if block == 0:
        tl.store(offs_ptr + experts, ends, mask=experts < E)
    lanes = tl.arange(0, BLOCK)
    at = block * BLOCK + lanes
    chosen = _experts_of(ids_ptr, at, pairs, E)
    routed = chosen >= 0
    rank = tl.sum(((chosen[None, :] == chosen[:, None]) & (lanes[None, :] < lanes[:, None])).to(tl.int32), axis=1)
    before = tl.load(counts_ptr + block * E + chosen, mask=routed, other=0)
    place = before + rank + tl.gather(ends - totals, tl.where(routed, chosen, 0), axis=0)
    tl.store(places_ptr + at, tl.where(routed, place, -1), mask=at < pairs)
    tl.store(pairs_ptr + place, at, mask=routed)
    tl.store(pairs_ptr + at, tl.zeros_like(at) - 1, mask=(at < pairs) & (at >= tl.sum(totals, axis=0)))
