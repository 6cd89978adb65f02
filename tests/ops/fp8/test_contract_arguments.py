"""FP8 quantization: arguments that do not fit, types that the device lacks, assertions of offsets."""

from dataclasses import replace

import pytest
import torch
import triton
from token_groups import ends_of

from kerneltune.ops import fp8
from kerneltune.ops.fp8.contract import FP8, fp8_dtype

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
X8 = torch.randn(20, 24, dtype=torch.bfloat16, device=WHERE)
TILES = fp8.SegmentConfig(rows=16, cols=32, warps=1, ctas=0, stages=1)


X = torch.zeros(4, 6, dtype=torch.bfloat16, device=WHERE)
W = torch.zeros(2, 6, 4, dtype=torch.bfloat16, device=WHERE)
TALL = torch.zeros(1 << 21, 1, dtype=torch.bfloat16, device=WHERE)
APART = torch.empty_strided((2, 6), (1 << 28, 1), dtype=torch.bfloat16, device="meta")
END = torch.empty(1, dtype=torch.int32, device="meta")
ROWS = fp8.RowConfig(rows=16, cols=64, warps=1, ctas=0, stages=1, reload=False)
STRIDED = torch.tensor([2, 3, 4, 4], dtype=torch.int32, device=WHERE)[::2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fp8.fp8_rowwise_2d(X, "e3m4"), "fp8_format must be one of e4m3.*'e3m4'"),
        (lambda: fp8.fp8_rowwise_2d(X.t()), "elements of a row of x must be adjacent"),
        (lambda: fp8.fp8_rowwise_2d(X.double()), "x must be a matrix of bfloat16.*float64"),
        (lambda: fp8.fp8_colwise_3d(W), r"w must be column-major, strides \(24, 1, 6\)"),
        (lambda: fp8.fp8_colwise_3d(X), r"w must be \(E, K, N\)"),
        (lambda: fp8.fp8_tensorwise_2d(X, layout="diagonal"), "layout must be one of row, col, both, got layout='diagonal'"),
        (
            lambda: fp8.fp8_tensorwise_2d(X, layout="both", config=replace(TILES, warps=2)),
            r"config=SegmentConfig\(rows=16, cols=32, warps=2, .* 8 elements per thread, of which .* transposed need 16",
        ),
        (lambda: fp8.fp8_tensorwise_3d(W), "w must be column-major"),
        (lambda: fp8.fp8_tensorwise_group(X, torch.tensor([4], device=WHERE)), r"offs must be \(G,\) int32 .*int64"),
        (lambda: fp8.fp8_tensorwise_group(X, torch.tensor([], dtype=torch.int32)), r"offs must be \(G,\) int32"),
        (lambda: fp8.fp8_group_colwise(X, 3 * torch.ones((), dtype=torch.int32)), r"offs must be \(G,\) int32"),
        (lambda: fp8.fp8_group_colwise(X[0], ends_of(4)), "x must be a matrix"),
        (lambda: fp8.fp8_group_colwise(X, STRIDED), r"offs must be contiguous, got strides \(2,\)"),
        (lambda: fp8.fp8_tensorwise_group(X, STRIDED), "offs must be contiguous"),
        (lambda: fp8.fp8_group_both(X, STRIDED), "offs must be contiguous"),
        (lambda: fp8.fp8_group_both(APART, END), r"rows of x must be less than 16777216 .* of 128, got strides \(268435456, 1\)"),
        (lambda: fp8.fp8_group_colwise(APART, END), "rows of x must be less than 33554432 numbers apart in tiles of 128"),
        (lambda: fp8.fp8_group_colwise_dual(X.to("meta")[:2], APART, END), "rows of x must be less than 33554432 numbers apart"),
        (lambda: fp8.fp8_tensorwise_2d(APART), "rows of x must be less than 67108864 numbers apart in tiles of 64"),
        (lambda: fp8.fp8_tensorwise_2d(APART, pow2=False), "rows of x must be less than 67108864 numbers apart"),
        (lambda: fp8.fp8_tensorwise_group(APART, END), "rows of x must be less than 67108864 numbers apart"),
        (lambda: fp8.fp8_rowwise_2d(APART), "rows of x must be less than 134217728 numbers apart in tiles of 16"),
        (
            lambda: fp8.fp8_rowwise_2d(APART, "e5m2", config=replace(ROWS, rows=64)),
            "less than 33554432 numbers apart in tiles of 64",
        ),
        (
            lambda: fp8.fp8_group_colwise_dual(X, X[:3], ends_of(4)),
            r"x2 must be \(4, N\) .* as x1 is, got \(3, 6\)",
        ),
        (lambda: fp8.fp8_group_colwise_dual(X, X.to("meta"), ends_of(4)), "x2 must be .* on .* as x1 is, got .* on meta"),
        (lambda: fp8.fp8_tensorwise_2d(TALL, layout="col"), "x must have at most 2097151 rows to be transposed, got 2097152"),
        (lambda: fp8.fp8_group_colwise(TALL, ends_of(1 << 21)), "x must have at most 2097151 rows"),
        (lambda: fp8.fp8_transpose_2d(X), "x must be a matrix of an fp8 type.*bfloat16"),
        (lambda: fp8.fp8_transpose_2d(X.to(torch.float8_e4m3fn).t()), "elements of a row of x must be adjacent"),
    ],
)
def test_casts_with_wrong_arguments_raise_with_their_names(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["e4m3fnuz", "e5m2fnuz"])
def test_fp8_dtype_that_the_device_lacks_raises(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.device(where)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert fp8_dtype(name, x) == FP8[name]
    monkeypatch.setattr(torch.version, "hip", None)
    if where == "cpu":
        assert fp8_dtype(name, x) == FP8[name]
        return
    with pytest.raises(ValueError, match=f"fp8_format='{name}' needs an AMD GPU .gfx942., got a tensor on cuda"):
        fp8_dtype(name, x)


@pytest.mark.skipif(WHERE == "cuda", reason="an assertion on a GPU ends its context")
@pytest.mark.parametrize("ends", [(12, 8), (8, 21)])
@pytest.mark.parametrize("cast", [fp8.fp8_group_both, fp8.fp8_group_colwise, fp8.fp8_tensorwise_group])
def test_group_casts_in_debug_mode_assert_offs(cast, ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(triton.knobs.runtime, "debug", True)
    cast(X8, ends_of(8, 20))
    cast(X8, ends_of(8, 19))  # rows behind the last group are left out
    with pytest.raises(RuntimeError, match="offs decrease or exceed M"):
        cast(X8, ends_of(*ends))
