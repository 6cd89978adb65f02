"""Casts that align groups: the bytes of casts that do not, elsewhere, and zeros behind each group; products agree to the bit."""

from typing import Any

import pytest
import torch
from token_groups import ends_of

from kerneltune.kernel_lib.groups import GROUP_ALIGNMENT, align_groups, aligned_size, aligned_starts
from kerneltune.ops import fp8
from kerneltune.ops.fp8_grouped_gemm import fp8_grouped_gemm
from kerneltune.rounding import cdiv

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
ENDS = [(1, 1, 138, 300), (300,), (0, 0, 300), (128, 256, 257, 300)]
SHORT = (7, 7, 70, 90)
"""Groups that leave rows behind the last."""


def values(M: int, K: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(M, K, device=WHERE).mul_(torch.exp2(torch.arange(M, device=WHERE)[:, None] % 9.0)).to(dtype)


def check_columns(q_t: torch.Tensor, plain: torch.Tensor, offs: torch.Tensor) -> None:
    """Compare every column that is defined: a group's, and zeros up to a multiple of the alignment."""
    want = align_groups(plain.view(torch.uint8), offs)
    assert q_t.shape == want.shape
    assert q_t.stride() == (1, want.shape[0])
    got = q_t.t().contiguous().t().view(torch.uint8)
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    for group, (to, size) in enumerate(zip(aligned_starts(offs).tolist(), sizes, strict=True)):
        stop = to + cdiv(size, GROUP_ALIGNMENT) * GROUP_ALIGNMENT
        assert torch.equal(got[to:stop], want[to:stop]), group


@pytest.mark.parametrize(
    ("ends", "options"), [(ENDS[0], {}), (ENDS[0], {"pow2": False}), (ENDS[2], {"inverse": True, "layout": "col"}), (ENDS[3], {})]
)
def test_tensorwise_cast_of_aligned_groups_has_the_bytes_of_packed_groups(ends: tuple[int, ...], options: dict[str, Any]) -> None:
    x, offs = values(300, 72), ends_of(*ends)
    options = {"layout": "both", **options}
    plain = fp8.fp8_tensorwise_group(x, offs, **options | {"layout": "both"})
    cast = fp8.fp8_tensorwise_group(x, offs, aligned=True, **options)
    assert torch.equal(cast.scale, plain.scale)
    assert cast.q is None or torch.equal(cast.q.view(torch.uint8), plain.q.view(torch.uint8))
    check_columns(cast.q_t, plain.q, offs)


@pytest.mark.parametrize(
    ("ends", "dtype", "pow2"),
    [
        (ENDS[0], torch.bfloat16, True),
        (ENDS[2], torch.float32, False),
        (SHORT, torch.float32, True),
        (SHORT, torch.bfloat16, False),
    ],
)
def test_tensorwise_cast_with_one_scale_uses_rows_of_all_groups(ends: tuple[int, ...], dtype: torch.dtype, pow2: bool) -> None:
    x, offs = values(300, 66, dtype), ends_of(*ends)
    x[ends[-1] :] = torch.nan
    plain = fp8.fp8_tensorwise_2d(x[: ends[-1]].contiguous(), layout="both", pow2=pow2)
    cast = fp8.fp8_tensorwise_2d(x, layout="both", pow2=pow2, offs=offs)
    assert torch.equal(cast.scale, plain.scale)
    assert torch.equal(cast.q[: ends[-1]].view(torch.uint8), plain.q.view(torch.uint8))
    rest = torch.zeros_like(cast.q[ends[-1] :])
    check_columns(cast.q_t, torch.cat([plain.q.view(torch.uint8), rest.view(torch.uint8)]), offs)


@pytest.mark.parametrize(("ends", "K"), [(ENDS[0], 67), (ENDS[2], 80), (ENDS[3], 67), (SHORT, 80)])
def test_cast_of_aligned_groups_in_both_layouts_has_the_bytes_of_packed_groups(ends: tuple[int, ...], K: int) -> None:
    x, offs = values(300, K), ends_of(*ends)
    plain = fp8.fp8_group_both(x, offs, inverse=True)
    cast = fp8.fp8_group_both(x, offs, inverse=True, aligned=True)
    last = ends[-1]
    for name in ("scale", "q"):
        got, want = (getattr(one, name)[:last].view(torch.uint8) for one in (cast, plain))
        assert torch.equal(got, want), name
    assert torch.equal(cast.scale_t, plain.scale_t)
    check_columns(cast.q_t, plain.q_t.contiguous(), offs)


@pytest.mark.parametrize(("ends", "rows"), [(ENDS[0], 64), (ENDS[2], 512), (SHORT, 128)])
def test_colwise_cast_of_aligned_groups_has_the_bytes_of_packed_groups(ends: tuple[int, ...], rows: int) -> None:
    x1, x2, offs = values(300, 66), values(300, 40), ends_of(*ends)
    config = fp8.GroupConfig(rows=rows, cols=64, warps=8, ctas=1, stages=1, ahead=1, reload=True)
    plain = fp8.fp8_group_colwise_dual(x1, x2, offs)
    cast = fp8.fp8_group_colwise_dual(x1, x2, offs, aligned=True, config=config)
    alone = fp8.fp8_group_colwise(x1, offs, aligned=True)
    for (q, scale), (want_q, want_scale) in zip((*cast, alone), (*plain, plain[0]), strict=True):
        assert torch.equal(scale, want_scale)
        check_columns(q, want_q.contiguous(), offs)


def test_weight_gradients_of_unaligned_groups_equal_those_of_aligned_groups() -> None:
    sizes, N, K = (1, 0, 137, 90), 48, 64
    offs = ends_of(*torch.tensor(sizes).cumsum(0).tolist())
    M = sum(sizes)
    x, dy = values(M, K), values(M, N)
    starts = aligned_starts(offs).tolist()
    spread = ends_of(*starts[1:], aligned_size(M, len(sizes)))  # every group with the zeros behind it
    gradients = []
    for rows, ends in ((lambda t: t, offs), (lambda t: align_groups(t, offs), spread)):
        a, b = (fp8.fp8_tensorwise_2d(rows(t), layout="col", inverse=True, offs=ends) for t in (dy, x))
        gradients.append(fp8_grouped_gemm(a.q_t.t(), b.q_t, a.scale, b.scale, ends, aligned=True, out_dtype=torch.float32))
    assert torch.equal(*gradients)


@pytest.mark.parametrize("ends", [(90, 40, 80), (-5, 500, 20), (2**31 - 1, -(2**31), 100), (50, 100, 129)], ids=str)
def test_cast_of_group_ends_in_disorder_neither_hangs_nor_writes_outside(ends: tuple[int, ...]) -> None:
    x, offs = values(128, 64), ends_of(*ends)
    for aligned in (False, True):
        fp8.fp8_tensorwise_group(x, offs, layout="both", aligned=aligned)
        fp8.fp8_group_both(x, offs, aligned=aligned)
        fp8.fp8_group_colwise(x, offs, aligned=aligned)
    fp8.fp8_tensorwise_2d(x, layout="both", offs=offs)
    good = ends_of(10, 60, 128)
    plain, again = fp8.fp8_group_both(x, good), fp8.fp8_group_both(x, good, aligned=True)
    assert torch.equal(plain.q.view(torch.uint8), again.q.view(torch.uint8))
    check_columns(again.q_t, plain.q_t.contiguous(), good)
    if WHERE == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cast_with_known_scales_uses_them_and_records_the_largest_magnitude(dtype: torch.dtype) -> None:
    x, offs = values(150, 64, dtype), ends_of(3, 90, 120)
    x[120:] = torch.inf
    scale, amax = torch.full((1,), 0.25, device=WHERE), torch.full((1,), 0.5, device=WHERE)
    cast = fp8.fp8_delayed_2d(x, offs, scale, amax)
    want = (x.float() * 0.25).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    want[120:] = 0
    assert torch.equal(cast.q[:120].view(torch.uint8), want[:120])
    check_columns(cast.q_t, want, offs)
    assert float(cast.scale) == 4
    assert float(amax) == float(x[:120].abs().max())


def test_cast_config_with_rows_that_do_not_divide_the_alignment_raises() -> None:
    config = fp8.SegmentConfig(rows=96, cols=64, warps=4, ctas=0, stages=1)
    with pytest.raises(ValueError, match="rows must divide 128"):
        fp8.fp8_tensorwise_2d(values(128, 64), layout="both", offs=ends_of(128), config=config)
