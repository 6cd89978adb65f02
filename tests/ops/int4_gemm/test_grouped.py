"""Grouped products of e4m3 tokens with weights of four bits: exact sums in every shape of program, bad operands, traffic."""

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from int4_codes import DEVICE, exact, some_codes, tokens_of

from kerneltune.nearness import ranked
from kerneltune.ops.int4_gemm import Int4GroupedConfig, cast_tokens, grouped, int4_fp8_grouped_gemm, pack
from kerneltune.ops.int4_gemm.kernels import fp8
from kerneltune.ops.int4_gemm.packing import Codes
from kerneltune.spec import Case


def ends(*counts: int) -> torch.Tensor:
    return torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)


def exact_groups(x: torch.Tensor, codes: Codes, offs: torch.Tensor) -> torch.Tensor:
    rows = codes.codes.shape[0] // offs.shape[0]
    bounds = [0, *offs.tolist()]
    parts = []
    for e, (start, end) in enumerate(pairwise(bounds)):
        of_group = slice(e * rows, (e + 1) * rows)
        zeros = None if codes.zeros is None else codes.zeros[of_group]
        parts.append(exact(x[start:end], Codes(codes.codes[of_group], codes.scales[of_group], zeros), None))
    return torch.cat(parts)


@pytest.mark.parametrize(("counts", "rows", "depth", "group", "zeros", "knobs"), [
    ((3,), 64, 128, 128, False, (16, 1, 4, 3)),
    ((0, 5, 0, 0, 20, 1, 0), 64, 160, 32, True, (16, 1, 4, 4)),  # empty groups, two steps of a group, k that ends in a block
    ((17, 0, 40), 128, 512, 64, False, (32, 2, 4, 3)),
    ((1, 70, 2), 256, 384, 128, True, (64, 2, 8, 3)),
    ((16, 16), 192, 416, 416, True, (16, 1, 4, 5)),  # one scale for all of k; groups that end with a step
    ((4, 33, 0, 97, 17, 16, 64, 32), 64, 128, 64, False, (64, 1, 4, 3)),  # steps of 64, 32 and 16 tokens; large groups come first
    ((0, 0, 2, 0, 0, 0, 1), 64, 128, 128, False, (16, 1, 4, 3)),  # more groups than tokens
    ((*[0, 1] * 17, 18), 64, 128, 128, False, (32, 1, 4, 3)),  # more groups than a warp has threads
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_int4_grouped_gemm_of_whole_numbers_is_exact(
    counts: tuple[int, ...], rows: int, depth: int, group: int, zeros: bool, knobs: tuple[int, ...], dtype: torch.dtype
) -> None:
    offs, codes = ends(*counts), some_codes(rows * len(counts), depth, group, zeros, dtype)
    x = tokens_of(sum(counts), depth, dtype)
    tolerance = 2.0**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0.0
    for early, k_blocks, rest in ((True, 1, 0), (False, 2, 0), (False, 1, 16), (True, 2, 32)):
        config = Int4GroupedConfig(*knobs, early=early, k_blocks=k_blocks, rest=rest)
        got = int4_fp8_grouped_gemm(x, pack(*codes), offs, config=config)
        torch.testing.assert_close(got, exact_groups(x, codes, offs), rtol=tolerance, atol=0)


@pytest.mark.skipif(DEVICE == "cuda", reason="a compiled kernel calls no function of Python")
@pytest.mark.parametrize(("most", "steps"), [
    (16, [(16, 33), (16, 17), (16, 1), (16, 70), (16, 54), (16, 38), (16, 22), (16, 6), (16, 3), (16, 16)]),
    (32, [(32, 33), (16, 1), (32, 70), (32, 38), (16, 6), (16, 3), (16, 16)]),
    (64, [(64, 33), (64, 70), (16, 6), (16, 3), (16, 16)]),
])  # fmt: skip
def test_steps_are_as_wide_as_a_group_needs_and_large_groups_come_first(
    most: int, steps: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    offs, seen = ends(0, 3, 33, 0, 16, 70), list[tuple[int, int]]()
    codes, x = some_codes(6 * 64, 128, 128), tokens_of(122, 128)

    def step(*args: Any) -> None:
        first_token, end, work = args[11], args[12], args[-1]
        seen.append((int(work.tokens), int(end) - int(first_token)))

    monkeypatch.setattr(fp8, "_step_of_group", step)
    int4_fp8_grouped_gemm(x, pack(*codes), offs, config=Int4GroupedConfig(most, 1, 4, 3, early=False))
    assert seen == steps


OFFS, CODES, X = ends(2, 0, 2), some_codes(3 * 64, 256, 128), tokens_of(4, 256)


def test_int4_grouped_gemm_of_cast_tokens_gives_the_same() -> None:
    want = exact_groups(X, CODES, OFFS)
    assert torch.equal(int4_fp8_grouped_gemm(X, pack(*CODES), OFFS), want)
    assert torch.equal(int4_fp8_grouped_gemm(cast_tokens(X), pack(*CODES), OFFS), want)
    assert int4_fp8_grouped_gemm(X[:0], pack(*CODES), OFFS * 0).shape == (0, 64)


@pytest.mark.parametrize(("offs", "ends_of", "known"), [
    ([5, 5, 60], (5, 5, 37), (0, 37)), ([-5, 5, 37], (0, 5, 37), (0, 37)), ([20, 5, 37], (5, 5, 37), (20, 37)),
    ([2**31 - 1, -(2**31), 4], (0, 0, 4), (0, 0)), ([99, 98, 97], (37, 37, 37), (0, 37)), ([-9, -8, -7], (0, 0, 0), (0, 0)),
])  # fmt: skip
def test_int4_grouped_gemm_of_offs_in_disorder_accesses_nothing_outside(
    offs: list[int], ends_of: tuple[int, ...], known: tuple[int, int]
) -> None:
    """The interpreter ends the process at an access outside, a GPU may end its context. known: rows with a defined result."""
    x, rows = tokens_of(37, 256), slice(*known)
    want, given = exact_groups(x, CODES, torch.tensor(ends_of)), torch.tensor(offs, dtype=torch.int32, device=DEVICE)
    for most in (16, 64):
        got = int4_fp8_grouped_gemm(x, pack(*CODES), given, config=Int4GroupedConfig(most, 1, 4, 3, early=True))
        assert torch.equal(got[rows], want[rows])


@pytest.mark.parametrize(("x", "offs", "message"), [
    (X[:, :128], OFFS, "x must be"), (X.bfloat16(), OFFS, "scales must be"), (X, OFFS.long(), "offs must be"),
    (X, OFFS[None], "offs must be"), (X, [2, 2, 4], "offs must be a tensor"), (X, OFFS[:0], "for each of 0 groups"),
    (X, OFFS[:2], "multiple of 64 rows for each of 2 groups, got 192 rows"), (X, ends(1, 1, 1, 0, 1, 0)[::2], "contiguous"),
    (cast_tokens(X)._replace(depth=128), OFFS, "x.q must be"),
])  # fmt: skip
def test_int4_grouped_gemm_of_operands_that_do_not_fit_raises(x: Any, offs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        int4_fp8_grouped_gemm(x, pack(*CODES), offs)


def test_int4_grouped_gemm_with_more_rows_than_the_weight_raises() -> None:
    with pytest.raises(ValueError, match="2 blocks of 64 rows, of which 64 rows are no multiple"):
        int4_fp8_grouped_gemm(X, pack(*CODES), OFFS, config=Int4GroupedConfig(16, 2, 4, 3, early=True))


def case_of(tokens: int, rows: int, depth: int, groups: int) -> Case:
    options = (("group", 64), ("zeros", False), ("groups", "routed"))
    return Case("", (("N", tokens), ("M", rows), ("K", depth), ("E", groups)), "bfloat16", "int4", options)


@pytest.mark.parametrize("tokens", [1, 16, 33, 128, 1000])
@pytest.mark.parametrize(("rows", "depth", "groups"), [(64, 64, 1), (4096, 7168, 32), (1536, 2048, 128), (2880, 2880, 32)])
def test_default_config_is_in_the_space(tokens: int, rows: int, depth: int, groups: int) -> None:
    case = case_of(tokens, rows, depth, groups)
    assert grouped.default(case) in list(grouped.OP.variant("optimized").configs(case))


@pytest.mark.parametrize(
    ("tokens", "rows", "depth", "groups", "group", "expected"),
    [
        (8, 5120, 4096, 16, 128, (16, 2, True, 0)),  # tokens, blocks, early, maxnreg; the cast of x occupies few SMs
        (9, 5120, 4096, 16, 128, (16, 2, False, 0)),
        (26, 2048, 4096, 8, 128, (16, 1, False, 0, 2)),  # so few programs for an SM that steps take two blocks of k
        (36, 2048, 7168, 6, 32, (16, 2, True, 0)),  # at most one program for an SM
        (65, 2048, 7168, 6, 32, (64, 1, False, 0)),
        (60, 7168, 4864, 16, 128, (16, 1, True, 0, 2)),  # 11.2 programs of one block: a wave of two blocks would be nearly empty
        (64, 10240, 4096, 16, 128, (16, 2, True, 0)),
        (72, 1024, 3584, 80, 128, (32, 2, False, 0)),  # half of all programs end at once, and an SM holds three
        (99, 1408, 2560, 48, 128, (16, 2, False, 0)),
        (12, 1024, 3584, 80, 128, (16, 1, False, 0, 2)),  # no more programs than tokens times tiles
        (256, 4096, 6400, 16, 128, (32, 2, False, 128)),
        (352, 7168, 4864, 16, 128, (32, 2, False, 128)),
        (22, 5120, 1920, 23, 128, (32, 2, True, 128)),
        (149, 1280, 768, 20, 128, (64, 2, False, 0)),  # between three and four programs for an SM, which holds three
        (1549, 1024, 12800, 24, 64, (64, 1, False, 128)),
        (2403, 832, 11136, 123, 64, (64, 1, True, 128)),  # an odd number of blocks of rows, more than 17 tokens to a group
        (400, 2048, 4096, 20, 128, (32, 1, False, 0)),  # five programs of an SM, as many as it holds without limits on registers
        (200, 2048, 4096, 20, 64, (32, 1, False, 80)),  # with two groups of k it holds four
        (200, 2560, 4096, 12, 64, (64, 2, False, 0)),
        (377, 1536, 4608, 52, 64, (16, 2, False, 0)),
        (1024, 4096, 7168, 32, 128, (64, 1, True, 128)),  # more than 25 tokens to a group
        (2048, 7168, 2048, 24, 32, (64, 2, True, 0)),
        (406, 832, 7680, 112, 32, (32, 1, True, 80)),
        (11, 7680, 2432, 11, 128, (16, 2, True, 0)),
        (99, 2560, 6400, 6, 128, (64, 1, False, 0, 2)),  # few programs: those of the largest group end last
        (20, 4096, 4096, 1, 128, (32, 1, True, 0, 2)),
        (200, 5568, 4096, 16, 128, (32, 1, True, 80)),  # an odd number of blocks of rows
        (29, 768, 7168, 8, 64, (16, 1, True, 0, 2)),
    ],
)
def test_default_follows_the_tokens_of_the_largest_group_and_the_programs_of_an_sm(
    tokens: int, rows: int, depth: int, groups: int, group: int, expected: tuple[Any, ...]
) -> None:
    case = case_of(tokens, rows, depth, groups)
    config = grouped.default(dataclasses.replace(case, options=(("group", group), *case.options[1:])))
    assert config == Int4GroupedConfig(*expected[:2], 4, 3, *expected[2:])


@pytest.mark.parametrize(("tokens", "expected"), [(1900, (32, 2)), (2096, (64, 2))])
def test_default_with_zero_points_has_steps_of_64_tokens_from_15_tokens_to_a_group_on(
    tokens: int, expected: tuple[int, int]
) -> None:
    case = dataclasses.replace(case_of(tokens, 512, 4608, 132), options=(("group", 128), ("zeros", True), ("groups", "routed")))
    config = grouped.default(case)
    assert (config.tokens, config.blocks) == expected


@pytest.mark.parametrize(("tokens", "serves"), [(363, True), (720, True), (1024, False), (256, False)])
def test_cached_config_of_512_tokens_serves_as_many_within_a_factor_of_1_4(tokens: int, serves: bool) -> None:
    op = grouped.OP
    wanted, stored = (
        (dict(c.axes), c.dtype, c.quant, dict(c.options)) for c in (case_of(n, 4096, 7168, 32) for n in (tokens, 512))
    )
    near = [*ranked(wanted, [(stored, "config")], op.free_axes, op.free_options, op.bands, op.max_distance)]
    assert bool(near) is serves


def test_invalid_refuses_too_many_registers_tokens_or_blocks_of_k() -> None:
    case, good = case_of(20, 128, 512, 2), Int4GroupedConfig(32, 2, 4, 3, early=True)
    assert grouped.invalid(case, good) is None
    for changed, reason in (
        ({"tokens": 64}, "64 tokens where there are 20"), ({"blocks": 1, "warps": 8}, "8 warps to 1 blocks"),
        ({"tokens": 128}, "128 sums"), ({"stages": 20}, "bytes of shared"), ({"maxnreg": 80}, "80 registers for 32 tokens"),
        ({"rest": 16}, "a rest for each of 2 groups"), ({"k_blocks": 8}, "8 blocks of k and rests of 0 groups where there are 4"),
    ):  # fmt: skip
        assert reason in (grouped.invalid(case, dataclasses.replace(good, **changed)) or ""), changed


def test_traffic_counts_at_most_one_weight_per_token() -> None:
    few, more, all_groups = (grouped.traffic(case_of(n, 4096, 7168, 32)).read for n in (1, 2, 64))
    assert few < 0.54 * 4096 * 7168
    assert 2 * few - more == 4 * 32  # the group ends are read once
    assert 31 * few < all_groups < 33 * few
