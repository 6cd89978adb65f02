"""Configs of products with weights of four bits: validity, first configs of a search, the default."""

import dataclasses

import pytest
from int4_codes import case_of, configs_of, warpgroups

from kerneltune.ops.int4_gemm import configs


def test_invalid_refuses_warpgroup_tiles_outside_of_the_space() -> None:
    config = warpgroups(32, 1, 3)
    assert configs.invalid(case_of(32, 4096, 4096), config) == "3 blocks of rows of warpgroups where there are 32 tokens"
    assert configs.invalid(case_of(8, 4096, 4096), dataclasses.replace(config, tokens=8, blocks=1)) is not None


def test_invalid_refuses_a_config_of_the_previous_schema() -> None:
    """Its 16 rows stood for warpgroups; the kernel of single warps has no such tile."""
    assert configs.invalid(case_of(32, 4096, 4096), configs.Int4Config(32, 16, 1, 1, prefetch=True)) == "16 rows of w per warp"


def test_invalid_allows_several_blocks_of_rows_for_many_tokens_and_large_weights_only() -> None:
    config = configs.Int4Config(32, 32, 1, 5, prefetch=True, blocks=4)
    assert configs.invalid(case_of(32, 5120, 25600), config) is None
    assert configs.invalid(case_of(32, 576, 7168), config) == "15 programs of 8 warps"
    assert configs.invalid(case_of(32, 57344, 8192), config) == "5 programs to 4 blocks of rows"
    few = dataclasses.replace(config, tokens=8)
    assert configs.invalid(case_of(8, 5120, 25600), few) == "4 blocks of rows where there are 8 tokens"
    for tokens in (8, 16, 32, 64):
        space = configs_of(case_of(tokens, 5120, 25600))
        assert len(space) <= 260
        assert {c.blocks for c in space} == ({1} if tokens == 8 else {1, 2, 4})


@pytest.mark.parametrize(("tokens", "want"), [
    (8, [(8, 32, 4, 4), (8, 64, 4, 4), (8, 32, 8, 2), (8, 64, 8, 2)]),
    (32, [(16, 32, 8, 1), (16, 64, 8, 1), (16, 32, 4, 2), (16, 64, 4, 2), (32, 32, 4, 2), (32, 64, 1, 8),
          (32, 32, 2, 4)]),
])  # fmt: skip
def test_promising_has_every_shape_of_program_with_the_shortest_first(tokens: int, want: list[tuple[int, ...]]) -> None:
    case = case_of(tokens, 3584, 8192)
    assert [dataclasses.astuple(c)[:4] for c in configs.promising(case) if c.blocks == 1] == want
    assert len(configs.promising(case)) <= 20
    assert set(configs.promising(case)) <= set(configs_of(case))
    assert len([c for c in configs_of(case) if c.blocks == 1]) <= 70


def test_invalid_refuses_a_config_of_few_tokens_for_many() -> None:
    """Programs that share a row have memory for their parts."""
    config = configs.Int4Config(16, 32, 4, 4, prefetch=True)
    assert configs.invalid(case_of(16, 4096, 4096), config) is None
    assert configs.invalid(case_of(8192, 4096, 4096), config) == "131072 programs whose parts are added up"
    assert configs.invalid(case_of(8, 4096, 4096), config) == "programs of 16 tokens where there are 8"


@pytest.mark.parametrize(("sizes", "want"), [
    ((1, 3584, 8192), (8, 32, 4, 4)), ((8, 3584, 8192), (8, 32, 4, 4)), ((16, 3584, 8192), (16, 32, 8, 2)),
    ((16, 4096, 4096), (16, 32, 8, 2)), ((16, 6144, 4096), (16, 32, 8, 1)), ((8, 10240, 8192), (8, 32, 4, 1)),
    ((1, 576, 7168), (8, 32, 8, 4)), ((8, 8192, 8192), (8, 32, 8, 1)), ((16, 51200, 5120), (16, 32, 4, 1)),
    ((16, 5120, 25600), (16, 32, 4, 3)), ((32, 576, 7168), (16, 32, 8, 4)), ((32, 28672, 4096), (32, 64, 1, 1, 2)),
    ((32, 10240, 5120), (32, 64, 1, 3, 2)), ((32, 5120, 25600), (32, 64, 1, 6, 2)), ((64, 10240, 5120), (64, 64, 1, 3, 4)),
])  # fmt: skip
def test_default_config_is_the_measured_best(sizes: tuple[int, int, int], want: tuple[int, ...]) -> None:
    case = case_of(*sizes)
    wanted = configs.Int4Config(*want[:4], True, *want[4:], warpgroup=len(want) > 4)
    assert configs.default(case) == wanted
    assert configs.default(case) in configs_of(case)


@pytest.mark.parametrize("tokens", [0, 1, 16, 33])
@pytest.mark.parametrize(("rows", "depth"), [(2, 32), (66, 416), (200_000, 40_000)])
@pytest.mark.parametrize("zeros", [False, True])
def test_default_config_of_every_case_is_in_the_space(tokens: int, rows: int, depth: int, zeros: bool) -> None:
    case = case_of(tokens, rows, depth, zeros=zeros)
    assert configs.default(case) in configs_of(case)
