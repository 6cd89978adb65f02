"""Products of e4m3 tokens with weights of four bits: exact sums in every shape of program, casts, bad inputs."""

import dataclasses
from typing import Any

import pytest
import torch
from int4_codes import DEVICE, case_of, exact, some_codes, tokens_of, whole_numbers

from kerneltune.device import NO_GPU, Device
from kerneltune.ops.int4_gemm import estimate, fp8_gemm
from kerneltune.ops.int4_gemm.fp8_gemm import Int4Fp8Config, cast_in_order, cast_tokens, int4_fp8_gemm
from kerneltune.ops.int4_gemm.kernels.fp8 import ORDER
from kerneltune.ops.int4_gemm.packing import pack
from kerneltune.rounding import cdiv

SHAPES = [
    (1, 64, 128, 128, False, (16, 1, 4, 1, 3)),
    (5, 130, 160, 32, True, (16, 2, 8, 1, 3)),  # rows and k that end in a block, four groups to a block of k
    (17, 66, 512, 64, False, (32, 1, 4, 2, 3)),
    (40, 194, 640, 128, True, (32, 2, 8, 3, 4)),  # several tiles of tokens; the last split has one block of k instead of two
    (33, 66, 416, 416, True, (64, 1, 4, 1, 3)),  # one group
    (70, 258, 384, 64, True, (64, 2, 8, 2, 2)),
    (100, 66, 256, 32, False, (128, 1, 4, 1, 2)),
]
"""Tokens, rows, depth, group, zeros; the knobs of a config."""


@pytest.mark.parametrize(("tokens", "rows", "depth", "group", "zeros", "knobs"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_int4_fp8_gemm_of_whole_numbers_is_exact(
    tokens: int, rows: int, depth: int, group: int, zeros: bool, knobs: tuple[int, ...], dtype: torch.dtype
) -> None:
    codes = some_codes(rows, depth, group, zeros, dtype)
    x, bias = tokens_of(tokens, depth, dtype), whole_numbers(1, rows, dtype)[0]
    tolerance = 2.0**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0.0
    for early, k_blocks, rest in ((True, 1, 0), (False, 2, 0), (False, 1, 16), (True, 2, 32), (True, 4, 16)):
        config = Int4Fp8Config(*knobs, early=early, k_blocks=k_blocks, rest=rest)
        if (config.splits - 1) * cdiv(cdiv(cdiv(depth, 128), config.splits), k_blocks) * k_blocks >= cdiv(depth, 128):
            continue  # the last split would have no block of k
        got = int4_fp8_gemm(x, pack(*codes), bias, config=config)
        torch.testing.assert_close(got, exact(x, codes, bias), rtol=tolerance, atol=0)


def test_cast_tokens_writes_each_32_elements_in_the_order_of_the_kernel() -> None:
    x = tokens_of(3, 160, torch.bfloat16)
    (plain, scale), ordered = cast_in_order(x), cast_tokens(x)
    assert torch.equal(plain.float() * scale[:, None], x.float())
    bytes_of = torch.nn.functional.pad(plain.view(torch.uint8), (0, 96)).view(3, -1, 32)
    assert torch.equal(ordered.q.view(torch.uint8).view(3, -1, 32), bytes_of[:, :, list(ORDER)])
    assert torch.equal(ordered.scale, scale)


def test_tokens_for_a_launch_without_a_rest_have_no_sums() -> None:
    x = whole_numbers(3, 160, torch.float16)
    with_sums, without = fp8_gemm.tokens_of(x, 16), fp8_gemm.tokens_of(x, 0)
    assert torch.equal(without.q.view(torch.uint8), with_sums.q.view(torch.uint8))
    assert torch.equal(without.scale, with_sums.scale)
    assert (with_sums.sums.shape, without.sums.shape) == ((3, 2, 5, 2), (0, 2, 5, 2))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_int4_fp8_gemm_of_a_token_with_nan_spoils_only_its_row(bad: float) -> None:
    codes, x = some_codes(66, 256, 128), tokens_of(3, 256, torch.float16)
    want = exact(x, codes, None)
    x[1, 7] = bad
    got = int4_fp8_gemm(x, pack(*codes))
    assert not got[1].isfinite().any()  # the interpreter takes NaN in e4m3 for 480, and the scale for infinity
    assert got[1].isnan().all() or DEVICE == "cpu"
    assert torch.equal(got[::2], want[::2])


def test_cast_tokens_of_large_and_tiny_values_neither_overflows_nor_vanishes() -> None:
    codes = some_codes(64, 128, 128)
    for scale in (65504.0 / 3.5, 2.0**-20):
        x = tokens_of(2, 128, torch.float16) * scale
        cast = cast_tokens(x)
        assert float(cast.q.float().abs().amax()) == 448
        got = cast.q.float() * cast.scale[:, None]
        torch.testing.assert_close(got, x.float()[:, [32 * b + k for b in range(4) for k in ORDER]], rtol=2.0**-4, atol=0)
        assert int4_fp8_gemm(x.bfloat16(), pack(codes.codes, codes.scales.bfloat16(), codes.zeros)).isfinite().all()


def test_int4_fp8_gemm_accepts_one_scale_for_all_tokens() -> None:
    codes, x = some_codes(66, 256, 64), tokens_of(4, 256, torch.float16)
    each = cast_tokens(x)
    assert torch.equal(int4_fp8_gemm(each._replace(scale=each.scale[:1].clone()), pack(*codes)), exact(x, codes, None))


CODES, X = some_codes(66, 256, 128), tokens_of(4, 256, torch.float16)
CAST = cast_tokens(X)
MISPLACED = torch.empty(1025, dtype=torch.uint8, device=DEVICE)[1:].view(torch.float8_e4m3fn).view(4, 256)


@pytest.mark.parametrize(("x", "message"), [
    (X.float(), "x must be"), (X[:, :128], "x must be"), (X.t(), "x must be"), (X.bfloat16(), "scales must be"),
    (CAST._replace(depth=128), "x.q must be"), (CAST._replace(q=CAST.q[:, ::2]), "x.q must be a contiguous"),
    (CAST._replace(q=CAST.q.float()), "x.q must be"), (CAST._replace(scale=CAST.scale[:3]), "x.scale must be"),
    (CAST._replace(scale=CAST.scale.half()), "x.scale must be"), (CAST._replace(dtype=torch.float32), "x.dtype must be"),
    (CAST._replace(q=MISPLACED), "multiple of 16"),
])  # fmt: skip
def test_int4_fp8_gemm_of_operands_that_do_not_fit_raises(x: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        int4_fp8_gemm(x, pack(*CODES))


def test_int4_fp8_gemm_with_more_splits_than_blocks_of_k_raises() -> None:
    with pytest.raises(ValueError, match="5 programs along 2 blocks of k"):
        int4_fp8_gemm(X, pack(*CODES), config=Int4Fp8Config(16, 1, 4, 5, 3, early=True))


def test_int4_fp8_gemm_of_no_tokens_is_empty() -> None:
    assert int4_fp8_gemm(X[:0], pack(*CODES)).shape == (0, 66)


@pytest.mark.parametrize("tokens", [1, 16, 33, 96, 128, 300])
@pytest.mark.parametrize(("rows", "depth"), [(2, 32), (64, 128), (576, 7168), (4096, 4096), (57344, 8192), (8192, 28672)])
def test_default_config_is_in_the_space(tokens: int, rows: int, depth: int) -> None:
    case = case_of(tokens, rows, depth, 0)
    variant = fp8_gemm.OP.variant("optimized")
    assert fp8_gemm.default(case) in list(variant.configs(case))


@pytest.mark.parametrize(
    ("tokens", "rows", "zeros", "group", "knobs"),
    [
        (16, 4096, False, 128, (1, 2, 16)),  # blocks of rows, blocks of k to a step, rest
        (16, 28672, False, 128, (1, 2, 32)),
        (16, 57344, False, 128, (2, 1, 32)),  # more programs of one block than the SMs hold
        (32, 28672, True, 128, (2, 2, 32)),
        (64, 4096, False, 128, (1, 2, 16)),
        (16, 4096, False, 64, (1, 1, 0)),  # a rest costs more for each group
        (64, 4096, False, 32, (1, 1, 0)),
        (64, 4096, True, 32, (1, 2, 16)),
        (128, 4096, False, 128, (1, 2, 0)),
        (128, 28672, False, 128, (1, 1, 0)),  # programs of 128 tokens
        (128, 4096, True, 128, (1, 2, 16)),  # only raw codes take zero points
    ],
)
def test_default_config_takes_raw_codes_for_few_tokens_and_zero_points(
    tokens: int, rows: int, zeros: bool, group: int, knobs: tuple[int, int, int]
) -> None:
    case = case_of(tokens, rows, 4096, group)
    case = dataclasses.replace(case, options=(("group", group), ("zeros", zeros), ("bias", False)))
    config = fp8_gemm.default(case)
    assert (config.blocks, config.k_blocks, config.rest) == knobs
    assert fp8_gemm.invalid(case, config) is None


@pytest.mark.parametrize(("gpu", "sms"), [(NO_GPU, 132), (Device("half an H100", "sm_90", 66, 1 << 25, "none"), 66)])
def test_default_config_has_splits_that_fill_the_sms(monkeypatch: pytest.MonkeyPatch, gpu: Device, sms: int) -> None:
    monkeypatch.setattr(estimate, "current", lambda: gpu)
    case = case_of(64, 4096, 4096, 128)
    assert fp8_gemm.shortest(fp8_gemm.sizes_of(case), sms).splits == (4 if sms == 132 else 2)
    assert fp8_gemm.default(case).splits == (4 if sms == 132 else 2)


def test_invalid_refuses_too_many_registers_and_empty_splits() -> None:
    case = case_of(128, 64, 512, 0)
    good = Int4Fp8Config(128, 1, 4, 1, 3, early=True)
    assert fp8_gemm.invalid(case, good) is None
    for changed, reason in (
        ({"blocks": 2}, "128 sums"), ({"splits": 2}, "whose parts"), ({"tokens": 64, "splits": 3}, "along 4 blocks"),
        ({"tokens": 16}, "16 tokens where there are 128"), ({"warps": 8}, "8 warps to 1 blocks"),
        ({"stages": 12}, "bytes of shared"), ({"tokens": 64, "k_blocks": 4}, "4 blocks of k for 64"),
        ({"rest": 32}, "32 groups where a program has 4"),
    ):  # fmt: skip
        assert reason in (fp8_gemm.invalid(case, dataclasses.replace(good, **changed)) or ""), changed
