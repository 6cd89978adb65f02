"""RMSNorm whose result is cast to e4m3 in the same launch: against fp64, against norm and cast apart, bad inputs, code."""

from typing import Any

import pytest
import torch
from int4_codes import DEVICE, exact, some_codes, whole_numbers
from pool_jobs import op_of, run_of
from torch import Tensor

from kerneltune.measuring.assembly import TARGETS
from kerneltune.measuring.compiler import CompilePool
from kerneltune.ops.int4_gemm import Fp8Tokens, cast_tokens, int4_fp8_gemm, norm_tokens, pack
from kerneltune.ops.int4_gemm.kernels.fp8 import ORDER, norm_rows
from kerneltune.ops.rmsnorm import rmsnorm_add_fwd, rmsnorm_fwd
from kerneltune.spec import Case

DTYPES = [torch.float16, torch.bfloat16]


def bytes_of(tokens: Fp8Tokens) -> Tensor:
    return tokens.q.view(torch.uint8)


def some_weight(depth: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(depth, device=DEVICE) + 0.5).to(dtype)


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm in fp64."""
    return x.double() * (x.double().square().mean(1, keepdim=True) + eps).rsqrt() * weight.double()


def close_to(tokens: Fp8Tokens, y: Tensor) -> None:
    """Check tokens against a norm in fp64: half a step of their type and of e4m3 away at most."""
    got = tokens.q.view(y.shape[0], -1, 32).double()[:, :, torch.tensor(ORDER, device=DEVICE).argsort()].flatten(1)
    got *= tokens.scale[:, None]
    error = (got[:, : y.shape[1]] - y).abs()
    assert bool((error <= 1.01 * (2.0**-4 + torch.finfo(tokens.dtype).eps) * y.abs() + 2.0**-10 * tokens.scale[:, None]).all())
    assert not got[:, y.shape[1] :].any()
    top = y.abs().amax(1).float() / 448
    torch.testing.assert_close(tokens.scale, top, rtol=torch.finfo(tokens.dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "depth"), [(1, 7), (3, 128), (5, 160), (2, 2880), (2, 5120), (2, 16384)])
def test_norm_tokens_agrees_with_fp64_and_with_norm_and_cast_apart(count: int, depth: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(count, depth, device=DEVICE).to(dtype), some_weight(depth, dtype)
    tokens, apart = norm_tokens(x, weight, eps=1e-5), cast_tokens(rmsnorm_fwd(x, weight, 1e-5).y)
    close_to(tokens, exact_norm(x, weight, 1e-5))
    assert (tokens.depth, tokens.dtype) == (depth, dtype)
    assert (bytes_of(tokens) != bytes_of(apart)).float().mean() <= 0.01  # where another order of the sum rounds elsewhere


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [128, 160, 256])
def test_norm_tokens_of_whole_numbers_has_the_bytes_of_norm_and_cast_apart(depth: int, dtype: torch.dtype) -> None:
    x, weight = whole_numbers(6, depth, dtype), some_weight(depth, dtype)
    for given, options in ((weight, {}), (weight.float(), {}), (None, {}), (weight - 1, {"zero_centered": True})):
        tokens, apart = norm_tokens(x, given, **options), cast_tokens(rmsnorm_fwd(x, given, **options).y)
        assert torch.equal(bytes_of(tokens), bytes_of(apart))
        assert torch.equal(tokens.scale, apart.scale)


def test_norm_tokens_with_a_residual_returns_the_sum_and_the_tokens_of_the_sum() -> None:
    x, residual = torch.randn(2, 5, 320, device=DEVICE).bfloat16()[:, :, :288]  # rows with gaps
    weight = some_weight(288, torch.bfloat16)
    tokens, total = norm_tokens(x, weight, residual=residual)
    want, apart = rmsnorm_add_fwd(x, residual, weight), norm_tokens(total, weight)
    assert torch.equal(total, want.total)
    assert torch.equal(bytes_of(tokens), bytes_of(apart))
    assert torch.equal(tokens.scale, apart.scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int4_fp8_gemm_of_normed_tokens_is_exact(dtype: torch.dtype) -> None:
    codes, x, weight = some_codes(66, 256, 64, dtype=dtype), *whole_numbers(2, 256, dtype)
    x = torch.where(x > 0, 1, -1).to(dtype).expand(5, 256).contiguous()  # the root mean square is 1
    weight[0] = 3.5  # the scale is a power of two
    got = int4_fp8_gemm(norm_tokens(x, weight, eps=0.0), pack(*codes))
    tolerance = 2.0**-7 if dtype == torch.bfloat16 and DEVICE == "cpu" else 0.0
    torch.testing.assert_close(got, exact(x * weight, codes, None), rtol=tolerance, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_norm_tokens_of_a_row_with_nan_spoils_only_its_row(bad: float) -> None:
    x, weight = torch.randn(3, 256, device=DEVICE).half(), some_weight(256, torch.float16)
    want = norm_tokens(x, weight)
    x[1, 7] = bad
    got = norm_tokens(x, weight)
    assert not got.scale[1].isfinite()
    assert torch.equal(got.scale[::2], want.scale[::2])
    assert torch.equal(bytes_of(got)[::2], bytes_of(want)[::2])


def test_norm_tokens_of_no_rows_is_empty() -> None:
    x = torch.empty(0, 160, dtype=torch.float16, device=DEVICE)
    tokens, total = norm_tokens(x, None, residual=x)
    assert (tokens.q.shape, tokens.scale.shape, total.shape) == ((0, 256), (0,), (0, 160))
    assert norm_tokens(x, None).q.shape == (0, 256)


X, WEIGHT = torch.randn(4, 64, device=DEVICE).half(), torch.ones(64, device=DEVICE).half()


@pytest.mark.parametrize(("change", "message"), [
    ({"x": X.float()}, "x must be float16 or bfloat16, got torch.float32"), ({"x": X[0]}, r"x must be a matrix .* \(64,\)"),
    ({"x": X.t()}, "elements of a row of x must be adjacent"), ({"x": X[:, :0]}, "x must have 1 to 16384 columns, got 0"),
    ({"x": X.repeat(1, 257)}, "x must have 1 to 16384 columns, got 16448"), ({"x": [1]}, r"x must be a tensor, got \[1\]"),
    ({"weight": WEIGHT[:32]}, r"weight must be \(64,\)"), ({"weight": WEIGHT.bfloat16()}, "weight must be .* torch.bfloat16"),
    ({"weight": 1.0}, "weight must be a tensor, got 1.0"), ({"weight": None, "zero_centered": True}, "needs a weight"),
    ({"residual": X[:3]}, r"residual must be \(4, 64\) .* got \(3, 64\)"), ({"residual": X.bfloat16()}, "residual must be"),
    ({"residual": 0.5}, "residual must be a tensor, got 0.5"), ({"eps": -1e-6}, "eps must not be negative, got eps=-1e-06"),
    ({"eps": float("nan")}, "eps must not be negative, got eps=nan"),
])  # fmt: skip
def test_norm_tokens_of_bad_operands_raises(change: dict[str, Any], message: str) -> None:
    operands: dict[str, Any] = {"x": X, "weight": WEIGHT} | change
    with pytest.raises(ValueError, match=message):
        norm_tokens(**operands)


def rows_of(case: Case, *, device: str) -> Tensor:
    return torch.empty(3 * 4 + 2, case["depth"], dtype=torch.bfloat16, device=device)


def launch(rows: Tensor, block: int) -> None:
    x, residual, total, weight = rows[:4], rows[4:8], rows[8:12], rows[12]
    q = torch.empty(4, rows.shape[1], dtype=torch.float8_e4m3fn, device=rows.device)
    sums = torch.empty(4, 2, rows.shape[1] // 32, device=rows.device)
    norm_rows[(4,)](
        x, residual, weight, total, q, rows[13].float(), sums, rows.stride(0), rows.stride(0), rows.shape[1],
        1 / rows.shape[1], 1e-6, ZERO_CENTERED=False, BLOCK=block, num_warps=min(32, block // 256), launch_pdl=True,
    )  # fmt: skip


OP = op_of(__name__, rows_of, launch)


@pytest.mark.parametrize(("depth", "block", "tokens_bits"), [(4096, 4096, 64), (5120, 8192, 64), (16384, 16384, 128)])
def test_norm_rows_for_hopper_reads_and_writes_vectors(depth: int, block: int, tokens_bits: int) -> None:
    run = run_of(OP, launch, block, Case("rows", (("depth", depth),), "bfloat16"))
    with CompilePool(TARGETS["sm_90"], 1) as pool:
        (compiled,) = pool.compile([run])
    assert compiled.error == ""
    (kernel,) = compiled.kernels
    loads, stores = ({a.bits: a.count for a in kernel.accesses if a.kind == kind} for kind in ("load", "store"))
    vectors = max(1, depth // 8192)  # of a thread
    assert loads == {128: 3 * vectors}
    assert stores == ({128: vectors, 64: 1, 32: 5} if tokens_bits == 64 else {128: vectors + 1, 32: 5})
    assert kernel.registers <= 64


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "depth"), [(1, 4096), (16, 4096), (64, 8192), (200, 5120)])
def test_product_of_normed_tokens_begins_early_and_reads_what_the_norm_wrote(count: int, depth: int) -> None:
    """Norm and product may begin while the launch in front still runs, also of the turn before, whose memory they write."""
    weight, gamma = pack(*some_codes(512, depth, 128, False, torch.bfloat16)), some_weight(depth, torch.bfloat16)
    sources = torch.randn(2, count, depth, device=DEVICE).bfloat16()
    x, residual, wants = torch.empty_like(sources[0]), sources.flip(0)[0].clone(), []
    for source in sources:
        tokens, total = norm_tokens(source, gamma, residual=residual)
        torch.cuda.synchronize()
        wants.append((total, int4_fp8_gemm(tokens, weight)))
        torch.cuda.synchronize()
    for turn in range(40):
        x.copy_(sources[turn % 2])
        tokens, total = norm_tokens(x, gamma, residual=residual)
        got = total, int4_fp8_gemm(tokens, weight)
        assert all(map(torch.equal, got, wants[turn % 2])), turn


@pytest.mark.gpu
def test_norm_and_product_in_a_cuda_graph_give_the_same() -> None:
    weight, gamma = pack(*some_codes(512, 4096, 128, False, torch.bfloat16)), some_weight(4096, torch.bfloat16)
    x, residual = torch.randn(2, 16, 4096, device=DEVICE).bfloat16()

    def step() -> tuple[Tensor, Tensor]:
        tokens, total = norm_tokens(x, gamma, residual=residual)
        return int4_fp8_gemm(tokens, weight), total

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(5):
        x.normal_()
        graph.replay()
        assert all(map(torch.equal, captured, step()))
