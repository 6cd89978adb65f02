"""`Int4Linear` with inputs that are cast to e4m3 or sorted: which product runs for how many tokens, and bad arguments."""

import copy
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from int4_codes import DEVICE, some_codes, whole_numbers
from torch import Tensor, nn

from kerneltune.nn import Int4Linear
from kerneltune.ops.int4_gemm import (
    Fp8Tokens,
    ProductConfig,
    cast_tokens,
    dequantise,
    fastest,
    fastest_gemm,
    group_order,
    int4_fp8_gemm,
    int4_gemm,
    norm_tokens,
    to_fp8,
)

CODES = some_codes(64, 256, 128)


def layer(*, kept: bool = False) -> Int4Linear:
    int4 = Int4Linear.from_codes(CODES, whole_numbers(1, 64, torch.float16)[0], activations="fp8")
    if kept:
        int4.keep_fp8_weight()
    return int4


def tokens(count: int) -> Tensor:
    return torch.randn(count, 256, device=DEVICE).half()


def test_int4_linear_casts_activations_beyond_few_tokens() -> None:
    int4 = layer()
    for count, product in ((32, int4_gemm), (129, int4_fp8_gemm)):
        x = tokens(count)
        assert torch.equal(int4(x), product(x, int4.weight, int4.bias)), count


def test_int4_linear_multiplies_many_tokens_by_the_kept_fp8_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    int4, x, shapes = layer(kept=True), tokens(129), []

    def scaled_mm(
        a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype, **_options: object
    ) -> Tensor:
        shapes.append((tuple(a.shape), tuple(b.shape)))
        return ((a.float() * scale_a) @ (b.float() * scale_b)).to(out_dtype)

    monkeypatch.setattr(fastest, "scaled_mm", scaled_mm)
    want = int4_gemm(x, int4.weight, int4.bias).float()
    error = (int4(x).float() - want).square().mean().sqrt() / want.square().mean().sqrt()
    assert error < 0.06
    assert shapes == [((129, 256), (256, 64))]


def test_int4_linear_with_a_static_scale_of_inputs_gives_the_static_product() -> None:
    int4, x = layer(), tokens(129)
    scale = x.abs().amax().float() / 448
    int4.keep_fp8_weight(scale)
    copy = to_fp8(dequantise(int4.weight, torch.float16), float(scale))
    want = fastest_gemm(x, int4.weight, int4.bias, copy, config=ProductConfig("fp8_static"))
    assert torch.equal(int4(x), want)
    assert torch.equal(int4.half()(x), want)
    exact = int4_gemm(x, int4.weight, int4.bias).float()
    assert (want.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt() < 0.06
    int4.keep_fp8_weight()
    assert int4.fp8_x_scale is None


def test_int4_linear_drops_the_kept_fp8_weight_when_state_is_loaded() -> None:
    int4 = layer()
    int4.keep_fp8_weight(0.01)
    assert int4.fp8_weight is not None
    assert not any(name.startswith("fp8") for name in int4.state_dict())
    int4.load_state_dict(int4.state_dict())
    assert (int4.fp8_weight, int4.fp8_scale, int4.fp8_x_scale) == (None, None, None)


@pytest.mark.parametrize("move", [
    nn.Module.half, nn.Module.bfloat16, nn.Module.share_memory, lambda int4: int4.to(DEVICE, torch.float16), copy.deepcopy,
])  # fmt: skip
def test_int4_linear_keeps_its_fp8_weight_when_cast_or_moved(move: Callable[[nn.Module], nn.Module]) -> None:
    int4 = layer(kept=True)
    q, scale = int4.fp8_weight, int4.fp8_scale
    assert q is not None
    assert scale is not None
    moved = move(int4)
    assert isinstance(moved, Int4Linear)
    assert moved.fp8_weight is not None
    assert moved.fp8_weight.dtype == torch.float8_e4m3fn
    assert torch.equal(moved.fp8_weight.view(torch.uint8), q.view(torch.uint8))
    assert moved.fp8_scale is not None
    assert moved.fp8_scale.dtype == torch.float32
    assert torch.equal(moved.fp8_scale, scale)
    x = tokens(200).to(moved.scales.dtype)
    assert moved(x).shape == (200, 64)


def test_int4_linear_on_the_meta_device_keeps_the_type_of_its_fp8_weight() -> None:
    int4 = layer(kept=True).half().to("meta")
    found = [(t.device.type, t.dtype) for t in (int4.fp8_weight, int4.fp8_scale) if t is not None]
    assert found == [("meta", torch.float8_e4m3fn), ("meta", torch.float32)]
    emptied = int4.to_empty(device=DEVICE)
    assert emptied.fp8_weight is not None
    assert (emptied.fp8_weight.shape, emptied.fp8_weight.dtype) == ((64, 256), torch.float8_e4m3fn)


def test_int4_linear_without_activations_keeps_inputs_in_16_bits() -> None:
    int4, x = Int4Linear.from_codes(CODES), tokens(40)
    assert torch.equal(int4(x), int4_gemm(x, int4.weight))
    with pytest.raises(ValueError, match="got activations=None"):
        int4.keep_fp8_weight()


def test_int4_linear_with_unknown_activations_or_sizes_raises() -> None:
    with pytest.raises(ValueError, match="activations must be 'fp8' or None, got 'int8'"):
        Int4Linear(128, 64, activations="int8")  # type: ignore[arg-type]
    odd = Int4Linear(128, 66, activations="fp8", device=DEVICE)
    with pytest.raises(ValueError, match=r"multiples of 16 rows and columns for a product in fp8, got \(66, 128\)"):
        odd.keep_fp8_weight()


def act_order(depth: int, group: int) -> Tensor:
    return (torch.arange(depth, device=DEVICE) // group)[torch.randperm(depth, device=DEVICE)]


@pytest.mark.parametrize("activations", [None, "fp8"])
def test_int4_linear_with_act_order_gives_the_product_of_its_weights(activations: Literal["fp8"] | None) -> None:
    codes, g_idx, x = some_codes(64, 256, 64), act_order(256, 64), whole_numbers(130, 256, torch.float16)
    x[:, 0] = 3.5  # scales that are powers of two: the cast to e4m3 is exact
    int4 = Int4Linear.from_codes(codes, order=group_order(g_idx, 64), activations=activations)
    assert codes.zeros is not None
    w = (codes.codes.double() - codes.zeros.double()[:, g_idx]) * codes.scales.double()[:, g_idx]
    want = (x.double() @ w.t()).half()
    assert torch.equal(int4(x), want)
    loaded = Int4Linear(256, 64, group=64, zeros=True, bias=False, device=DEVICE, ordered=True)
    loaded.load_state_dict(int4.state_dict())
    assert torch.equal(loaded(x), want)


def test_int4_linear_with_an_invalid_order_raises() -> None:
    g_idx = act_order(256, 128)
    with pytest.raises(ValueError, match="every group 64 k, group 1 has fewer or more"):
        group_order(g_idx, 64)
    with pytest.raises(ValueError, match=r"integers, K a multiple of group=96, got \(256,\)"):
        group_order(g_idx, 96)
    with pytest.raises(ValueError, match=r"order must be a tensor, got \[1, 2\]"):
        Int4Linear.from_codes(CODES, order=[1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="group must be an integer, got group='64'"):
        group_order(g_idx, "64")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"g_idx must be a tensor, got \[0, 0\]"):
        group_order([0, 0], 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="each of 0 … 255 once"):
        Int4Linear.from_codes(CODES, order=torch.zeros(256, dtype=torch.int64, device=DEVICE))
    with pytest.raises(ValueError, match=r"order must be \(256,\) torch.int64 on [\w:]+, got \(64,\)"):
        Int4Linear.from_codes(CODES, order=torch.arange(64, device=DEVICE))
    broken = Int4Linear.from_codes(CODES, order=group_order(g_idx, 128))
    state = {**broken.state_dict(), "order": torch.zeros(256, dtype=torch.int64, device=DEVICE)}
    with pytest.raises(RuntimeError, match="each of 0 … 255 once"):
        broken.load_state_dict(state)


def test_int4_linear_multiplies_cast_tokens_by_int4_fp8_gemm_whatever_their_number() -> None:
    int4, weight = layer(kept=True), torch.ones(256, device=DEVICE).half()
    for count in (0, 1, 32, 200):
        for cast in (norm_tokens(tokens(count), weight), cast_tokens(tokens(count))):
            assert torch.equal(int4(cast), int4_fp8_gemm(cast, int4.weight, int4.bias)), count


def test_int4_linear_behind_norm_tokens_compiles_without_a_graph_break() -> None:
    int4, weight = layer(), torch.nn.Parameter(torch.ones(256, device=DEVICE).half())

    def step(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        made, total = norm_tokens(x, weight, residual=residual)
        return int4(made), int4(norm_tokens(total, None)) + total[:, :64]

    compiled = torch.compile(step, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    with torch.no_grad():
        for count in (3, 5):
            x, residual = tokens(count), tokens(count)
            assert all(map(torch.equal, compiled(x, residual), step(x, residual)))


CAST = cast_tokens(tokens(4))


@pytest.mark.parametrize(("x", "options", "message"), [
    (CAST, {}, "activations='fp8' and ordered=False, got activations=None, ordered=False"),
    (CAST, {"activations": "fp8", "ordered": True}, "got activations='fp8', ordered=True"),
    (cast_tokens(tokens(4)[:, :128]), {"activations": "fp8"}, r"takes \(N, 256\) torch.float16, got \(N, 128\) torch.float16"),
    (cast_tokens(tokens(4).bfloat16()), {"activations": "fp8"}, r"got \(N, 256\) torch.bfloat16"),
    (CAST._replace(q=CAST.q[:, :128]), {"activations": "fp8"}, "x.q must be a contiguous matrix"),
    (CAST._replace(scale=CAST.scale[:3]), {"activations": "fp8"}, r"x.scale must be \(4,\)"),
])  # fmt: skip
def test_int4_linear_of_cast_tokens_that_do_not_fit_raises(x: Fp8Tokens, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Int4Linear(256, 64, device=DEVICE, **options)(x)
