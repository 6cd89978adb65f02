"""FP8 casts into both layouts in one launch: who does what, and that all is exact, of weights and of token groups."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from kerneltune.kernel_lib.agreement import same_bits
from kerneltune.ops import fp8
from kerneltune.ops.fp8 import contract, group_both, rowwise_3d_both
from kerneltune.ops.fp8.kernels import both
from kerneltune.ops.fp8.kernels.both import role_of
from kerneltune.rounding import next_power_of_2
from kerneltune.spec import Case

WHERE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_default_config_of_both_layouts_is_valid(dtype: str) -> None:
    for K in [*range(1, 200), *range(200, 20000, 57)]:
        for rows, experts in ((64, 1), (2048, 64)):
            weights = Case("", (("E", experts), ("K", K), ("N", rows)), dtype, "fp8")
            tokens = Case("", (("M", experts * rows), ("K", K), ("G", experts)), dtype, "fp8")
            assert rowwise_3d_both.invalid(weights, rowwise_3d_both.default(weights)) is None, weights.label
            assert rowwise_3d_both.invalid(tokens, group_both.default(tokens)) is None, tokens.label


@triton.jit
def _roles(out_ptr, first, lag, BLOCKS: tl.constexpr, TILES: tl.constexpr, COUNT: tl.constexpr):
    ids = tl.arange(0, COUNT)
    expert, block, tile, _ = role_of(first + ids, lag, BLOCKS, TILES)
    tl.store(out_ptr + ids, expert)
    tl.store(out_ptr + COUNT + ids, block)
    tl.store(out_ptr + 2 * COUNT + ids, tile)


def roles(blocks: int, tiles: int, lag: int, first: int, count: int) -> list[tuple[int, int, int]]:
    """Return (expert, block, tile) of programs; the block counts where the tile is -1."""
    out = torch.empty(3, next_power_of_2(count), dtype=torch.int32, device=WHERE)
    _roles[(1,)](out, first, lag, BLOCKS=blocks, TILES=tiles, COUNT=out.shape[1])
    return list(zip(*out[:, :count].tolist(), strict=True))


@pytest.mark.parametrize(
    ("experts", "blocks", "tiles", "lag"),
    [(3, 5, 14, 5), (3, 5, 14, 9), (2, 88, 176, 200), (4, 1, 1, 1), (1, 16, 3, 16), (5, 7, 2, 8)],
)
def test_programs_of_both_layouts_cover_all_blocks_once_and_await_earlier_ones_only(
    experts: int, blocks: int, tiles: int, lag: int
) -> None:
    rows, turned = {}, {}
    lag = min(lag, experts * blocks)
    for program, (expert, block, tile) in enumerate(roles(blocks, tiles, lag, 0, lag + experts * (blocks + tiles))):
        where, what = (turned, (expert, tile)) if tile >= 0 else (rows, block)
        assert what not in where
        where[what] = program
    assert {block for block in rows if block < experts * blocks} == set(range(experts * blocks))
    assert set(turned) == {(expert, tile) for expert in range(experts) for tile in range(tiles)}
    for expert in range(experts):
        assert max(rows[expert * blocks + i] for i in range(blocks)) < min(turned[expert, tile] for tile in range(tiles))


def test_program_ids_of_experts_with_more_than_2_to_the_31_rows_times_blocks_are_right() -> None:
    """Row blocks times programs of an expert are more than 2^31."""
    blocks, tiles = 8192, 262144
    programs = roles(blocks, tiles, blocks, 2 * blocks + tiles - 4096, 4096)
    assert [tile for _, _, tile in programs if tile >= 0][-1] == tiles - 1
    cast = [block for _, block, tile in programs if tile < 0]
    assert cast == list(range(2 * blocks - len(cast), 2 * blocks))
    assert len(cast) in (124, 125)


@pytest.mark.parametrize("K", [40, 67])
@pytest.mark.parametrize(("lag", "together"), [(0, True), (9, True), (0, False)])
def test_rowwise_cast_in_both_layouts_is_exact_in_one_launch_and_in_two(
    K: int, lag: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cast takes two launches where programs may not wait for each other; there the launches always follow each other."""
    counted = torch.zeros(16, dtype=torch.int64, device=WHERE)
    monkeypatch.setattr(both, "counters", lambda *_: nullcontext(counted))
    if not together:
        monkeypatch.setattr(both, "is_cuda", lambda: False)
        monkeypatch.setattr(both, "INTERPRETED", False)
    w = contract.values((3, 70, K), torch.bfloat16, WHERE, seed=5).transpose(1, 2)
    config = fp8.BothConfig(rows=16, step=4, cols=32, warps=1, lag=lag)
    want = rowwise_3d_both.reference({"w": w, "fp8_format": "e4m3", "pow2": True, "inverse": False})
    outputs = fp8.fp8_rowwise_3d_both(w, config=config)._asdict()
    for name in ("q", "q_t", "scale", "scale_t"):
        assert same_bits(name, outputs[name], want[name]) == []
    assert not counted.any()


@pytest.mark.gpu
@pytest.mark.parametrize("lag", [2, 8])
@pytest.mark.parametrize(("E", "K", "N"), [(64, 2048, 1408), (3, 7168, 4096), (128, 64, 96), (5, 67, 131)])
def test_rowwise_cast_in_both_layouts_is_exact_every_time(E: int, K: int, N: int, lag: int) -> None:
    """The weights differ each time, and programs wait on words of a workspace that earlier weights have set."""
    axes = (("E", E), ("K", K), ("N", N))
    config = replace(rowwise_3d_both.default(Case("each", axes, "bfloat16", "fp8")), lag=lag)
    for seed in range(10):
        w = contract.values((E, N, K), torch.bfloat16, WHERE, seed=seed).transpose(1, 2)
        outputs = fp8.fp8_rowwise_3d_both(w, config=config)
        for got, want in zip(outputs, (*fp8.fp8_colwise_3d(w), *fp8.fp8_rowwise_3d_transpose(w)), strict=True):
            assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


ONE_BY_ONE, IN_TWO = (1, 9, True), (4, 0, False)


@pytest.mark.parametrize(
    ("M", "K", "ends", "step", "lag", "together"),
    [
        *((96, 40, (16, 48, 48, 96), *launched) for launched in ((4, 0, True), (4, 9, True))),
        *((133, 67, (0, 5, 6, 90), *launched) for launched in ((4, 0, True), (4, 9, True), ONE_BY_ONE, IN_TWO)),
        *((128, 66, (17, 128, 128), *launched) for launched in ((4, 9, True), IN_TWO)),
    ],
)
def test_group_cast_in_both_layouts_is_exact_in_one_launch_and_in_two(
    M: int, K: int, ends: tuple[int, ...], step: int, lag: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cast groups of no rows, of one, of fewer than a program casts, that begin in the middle of 16 or behind the last tile.

    Also groups of rows that lie apart, and rows behind the last group, for which no program waits.
    """
    counted = torch.zeros(16, dtype=torch.int64, device=WHERE)
    monkeypatch.setattr(both, "counters", lambda *_: nullcontext(counted))
    if not together:
        monkeypatch.setattr(both, "is_cuda", lambda: False)
        monkeypatch.setattr(both, "INTERPRETED", False)
    x = contract.values((M, K + 2), torch.bfloat16, WHERE, seed=3)[:, :K]
    config = fp8.BothConfig(rows=16, step=step, cols=64, warps=1, lag=lag)
    options = {"fp8_format": "e4m3", "pow2": True, "inverse": False}
    offs = torch.tensor(ends, dtype=torch.int32, device=WHERE)
    want = group_both.reference({"x": x[: ends[-1]], "offs": offs, **options})
    outputs = fp8.fp8_group_both(x, offs, config=config)
    for name in ("q", "q_t", "scale"):
        assert same_bits(name, getattr(outputs, name)[: ends[-1]], want[name]) == []
    assert same_bits("scale_t", outputs.scale_t, want["scale_t"]) == []
    assert not counted.any()


@pytest.mark.gpu
@pytest.mark.parametrize("groups", ["balanced", "zipf", "ragged"])
@pytest.mark.parametrize(("M", "K", "G"), [(32768, 2048, 8), (16384, 7168, 32), (4096, 1408, 128), (3001, 2880, 12)])
def test_group_cast_in_both_layouts_is_exact_every_time(M: int, K: int, G: int, groups: str) -> None:
    """Tokens and groups differ each time, and programs wait on words of a workspace that earlier tokens have set."""
    options = {"fp8_format": "e4m3", "pow2": True, "inverse": False, "special": False, "groups": groups}
    case = Case("each", (("M", M), ("K", K), ("G", G)), "bfloat16", "fp8", tuple(options.items()))
    for seed in range(6):
        inputs = contract.inputs(case, device=WHERE, seed=seed)
        for lag in (2, 8):
            outputs = fp8.fp8_group_both(**inputs, config=replace(group_both.default(case), lag=lag))._asdict()
            for name, want in group_both.run_separately(inputs, None).items():
                assert torch.equal(outputs[name].contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)), (
                    seed,
                    name,
                )
