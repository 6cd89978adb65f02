"""Multiply by weights of four bits with the product that is the fastest for the tokens; axes and formula as in `int4_gemm`.

Five products take the same tokens: `int4_gemm` of 16 bits, `int4_fp8_gemm` of e4m3, and three of torch's in fp8, whose weight is
a copy in e4m3. The product is a knob, so that a search on a GPU finds from how many tokens on each is the fastest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from kerneltune import cache
from kerneltune.compat import scaled_mm
from kerneltune.kernel_lib.arguments import check_like
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.kernel_lib.tl_lib import INTERPRETED, since_sm_90
from kerneltune.ops.int4_gemm import configs, fp8_gemm, gemm, peers, reference
from kerneltune.ops.int4_gemm.kernels.fp8 import cast_by, scale_sums
from kerneltune.ops.int4_gemm.packing import Int4Weight, to_e4m3
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Op, Option, Outputs, Space, Variant

PRODUCTS = ("int4_gemm", "int4_fp8_gemm", "fp8", "fp8_scaled", "fp8_static")
"""Names of the products. `fp8`: torch's product with a scale for every token and every row of w. `fp8_scaled`: torch's product
with one scale, whose result is scaled by token and row in a launch of its own; rounded to bf16 in between. `fp8_static`: torch's
product with a scale of x that is known in advance, and one of w."""
_COPIES: Mapping[str, Option] = {"fp8": True, "fp8_scaled": True, "fp8_static": "static"}
"""Product that reads the weight in e4m3 -> value of the option `fp8_copy` that it needs."""
_MOST_ELEMENTS = ((16, 250_000_000), (32, 35_000_000), (64, 20_000_000), (128, 10_000_000))
"""Elements of w below which `int4_gemm` is the fastest for so many tokens or fewer (H200, 2026-11-29, 19 weights)."""
_CAST_BLOCK = 1024
"""Elements that a program casts with a known scale, or scales."""


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """Config of a product.

    Attributes:
        product: a name of `PRODUCTS`.
    """

    product: str


class Fp8Weight(NamedTuple):
    """A weight in e4m3, for many tokens. Made by `to_fp8`.

    Attributes:
        q: (M, K) float8_e4m3fn, contiguous.
        scale: (M,) float32: an element of w is its q times the scale of its row; (1,), the scale of all, with x_scale.
        x_scale: (1,) float32: the scale of x, known in advance; None casts each token with a scale of its own.
    """

    q: torch.Tensor
    scale: torch.Tensor
    x_scale: torch.Tensor | None = None


def to_fp8(w: torch.Tensor, x_scale: float | torch.Tensor | None = None) -> Fp8Weight:
    """Cast w (M, K) to e4m3, with a scale for each row or, where the scale of x is known in advance, with one scale.

    Args:
        x_scale: the scale of x: largest magnitude over 448, of the tokens that a model is calibrated on; a number or a tensor
            of one element. None casts each token with a scale of its own.

    Raises:
        ValueError: sizes that are not multiples of 16, which torch's product needs; an x_scale that is no normal fp32 above 0.
    """
    if w.shape[0] % 16 or w.shape[1] % 16:
        raise ValueError(f"w must have multiples of 16 rows and columns for a product in fp8, got {tuple(w.shape)}")
    if x_scale is None:
        return Fp8Weight(*to_e4m3(w, by_row=True))
    limits, scale = torch.finfo(torch.float32), float(x_scale)
    if not limits.tiny <= scale <= limits.max:
        raise ValueError(f"x_scale must be {limits.tiny:.4g} to {limits.max:.4g}, got {scale}")
    return Fp8Weight(*to_e4m3(w, by_row=False), torch.full((1,), scale, device=w.device))


def _fp8_product(x: torch.Tensor, w: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return torch's product of x, cast to e4m3, and a weight in e4m3."""
    q, scale = fp8_gemm.cast_in_order(x)
    y = scaled_mm(q, w.q.t(), scale[:, None], w.scale[None, :], out_dtype=x.dtype, use_fast_accum=True)
    return y if bias is None else y + bias


def _scaled_fp8_product(x: torch.Tensor, w: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return torch's product with one scale of x, cast to e4m3, and a weight in e4m3, scaled by token and row in a launch.

    Both operands get the scale of row 0, which needs no memory of its own; the last launch divides by its square.
    """
    N, M = x.shape[0], w.q.shape[0]
    if not N:
        return x.new_empty((N, M))
    (q, scale), first = fp8_gemm.cast_in_order(x), w.scale[:1]
    sums = scaled_mm(q, w.q.t(), first, first, out_dtype=torch.bfloat16, use_fast_accum=True)
    y = sums if x.dtype == torch.bfloat16 else torch.empty_like(sums, dtype=x.dtype)
    scale_sums[(cdiv(M, _CAST_BLOCK), N)](
        sums, scale, w.scale, y if bias is None else bias, y, M, BIAS=bias is not None, BLOCK=_CAST_BLOCK, num_warps=4,
        **({"launch_pdl": True} if since_sm_90() else {}),
    )  # fmt: skip
    return y


def _static_fp8_product(x: torch.Tensor, w: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return torch's product of x, cast to e4m3 with its known scale, and a weight in e4m3 with one scale."""
    assert w.x_scale is not None
    if not x.shape[0]:
        return x.new_empty((0, w.q.shape[0]))
    q, early = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device), {"launch_pdl": True} if since_sm_90() else {}
    cast_by[(cdiv(q.numel(), _CAST_BLOCK),)](x.contiguous(), q, w.x_scale, q.numel(), BLOCK=_CAST_BLOCK, num_warps=4, **early)
    y = scaled_mm(q, w.q.t(), w.x_scale, w.scale, out_dtype=x.dtype, use_fast_accum=True)
    return y if bias is None else y + bias


_FP8_PRODUCTS = {"fp8": _fp8_product, "fp8_scaled": _scaled_fp8_product, "fp8_static": _static_fp8_product}
"""Product that reads the weight in e4m3 -> its function."""


@on_its_device
def fastest_gemm(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    fp8_weight: Fp8Weight | None = None,
    *,
    config: ProductConfig | None = None,
) -> torch.Tensor:
    """Return x · wᵀ + bias by the fastest of five products. On GPUs before Hopper x stays in 16 bits.

    Args:
        x: (N, K) fp16 or bf16; rows may be any distance apart, elements of a row must be adjacent.
        weight: w (M, K), from `pack`, with scales and zero points of x's type.
        bias: (M,) of x's type, or None.
        fp8_weight: the same weight in e4m3, for many tokens; None if there is no memory for it. If it has a scale of x, elements
            of x that exceed 448 times that scale count as 448 times the scale in torch's product.
        config: None takes the best known product.

    Returns:
        (N, M) of x's type, contiguous. The same inputs and config give the same bits.
    """
    gemm.check(x, weight, bias)
    if not (INTERPRETED or since_sm_90()):
        return gemm.int4_gemm(x, weight, bias)
    if config is None:
        config = gemm.look_up(_choose, x.shape[0], weight, x.dtype, bias=bias is not None, fp8_copy=_option_of(fp8_weight))
    c: ProductConfig = config
    if c.product == "int4_gemm":
        return gemm.int4_gemm(x, weight, bias)
    if c.product == "int4_fp8_gemm":
        return fp8_gemm.int4_fp8_gemm(x, weight, bias)
    if fp8_weight is None or _COPIES.get(c.product) != _option_of(fp8_weight):
        names = ", ".join(PRODUCTS)
        raise ValueError(f"config={c}: expected one of {names}, of fp8 with the weight in fp8, static with a scale of x")
    check_like("fp8_weight.q", fp8_weight.q, (weight.rows, weight.depth), torch.float8_e4m3fn, x.device)
    scales = weight.rows
    if fp8_weight.x_scale is not None:
        check_like("fp8_weight.x_scale", fp8_weight.x_scale, (1,), torch.float32, x.device)
        scales = 1
    check_like("fp8_weight.scale", fp8_weight.scale, (scales,), torch.float32, x.device)
    return _FP8_PRODUCTS[c.product](x, fp8_weight, bias)


def _option_of(fp8_weight: Fp8Weight | None) -> Option:
    """Return the value of the option `fp8_copy` for a call."""
    return "static" if fp8_weight is not None and fp8_weight.x_scale is not None else fp8_weight is not None


def space(_case: Case) -> Space:
    """Offer every product."""
    return {"product": PRODUCTS}


def invalid(case: Case, config: ProductConfig) -> str | None:
    """Say why a product cannot run."""
    if config.product not in PRODUCTS:
        return f"product {config.product}, which is none of {', '.join(PRODUCTS)}"
    needed = _COPIES.get(config.product, case.option("fp8_copy"))
    if case.option("fp8_copy") != needed:
        return f"product {config.product} without fp8_copy={needed}"
    return peers.not_scaled_mm(case) if config.product in _COPIES else None


def default(case: Case) -> ProductConfig:
    """Return a product for any shape, by rule.

    The bounds fit the times of 19 weights with 16 to 256 tokens, casts included (H200, 2026-11-29). With zero points
    a quarter lies between the two weights that were timed with 16 tokens.
    """
    tokens, rows, depth = case["N"], case["M"], case["K"]
    most = next((elements for limit, elements in _MOST_ELEMENTS if tokens <= limit), 0)
    if rows * depth < (most // 4 if case.option("zeros") and tokens > 8 else most):  # `int4_gemm` subtracts each zero point
        return ProductConfig("int4_gemm")
    is_static = case.option("fp8_copy") == "static"
    is_tall = rows < 8000 and (depth >= 4000 if is_static else depth >= 7000 and rows * depth < 100_000_000)
    reads_fp8 = tokens > 128 or (tokens > 64 and depth >= 2000) or (tokens > 48 and is_tall)
    by_token = "fp8_scaled" if (rows < 10_000 and tokens <= 512) or 128 < tokens < 256 else "fp8"
    fp8 = ProductConfig("fp8_static" if is_static else by_token)
    return fp8 if reads_fp8 and invalid(case, fp8) is None else ProductConfig("int4_fp8_gemm")


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw the inputs of `int4_gemm`; fp8_copy as in the case."""
    return {**reference.inputs(case, device=device, seed=seed), "fp8_copy": case.option("fp8_copy")}


def _copy(inputs: Inputs) -> Fp8Weight | None:
    """Return the weight in e4m3, made at its first use; None if the case or the sizes leave it out."""
    weight = inputs["weight"]
    if not inputs["fp8_copy"] or weight.rows % 16 or weight.depth % 16:
        return None
    return _static_copy(inputs) if inputs["fp8_copy"] == "static" else _by_row(inputs["forms"])


def _by_row(forms: reference.Forms) -> Fp8Weight:
    """Return the weight in e4m3 with a scale for each row."""
    copy: Fp8Weight = forms.other("fp8", lambda forms: to_fp8(forms.dequantised))
    return copy


def _static_copy(inputs: Inputs) -> Fp8Weight:
    """Return the weight in e4m3 with one scale, and the scale of the case's x."""
    x: torch.Tensor = inputs["x"]

    def make(forms: reference.Forms) -> Fp8Weight:
        x_scale = to_e4m3(x, by_row=False)[1] if x.numel() else torch.ones(1, device=x.device)
        return Fp8Weight(*to_e4m3(forms.dequantised, by_row=False), x_scale)

    copy: Fp8Weight = inputs["forms"].other("static", make)
    return copy


def run(inputs: Inputs, config: ProductConfig | None) -> Outputs:
    """Run `fastest_gemm` on a case's inputs, casts of x included."""
    copy = _copy(inputs) if config is None or config.product in _FP8_PRODUCTS else None
    y = fastest_gemm(inputs["x"], inputs["weight"], inputs.get("bias"), copy, config=config)
    return {"y": y} if config is not None and config.product == "int4_gemm" else {"y": y, "rounding": reference.E4M3_ROUNDING}


def run_product(product: str, inputs: Inputs, _config: None) -> Outputs:
    """Run a product of `PRODUCTS`."""
    return run(inputs, ProductConfig(product))


def scaled_mm_static(inputs: Inputs, _config: None) -> Outputs:
    """Run torch's product with a scale for x, known in advance, and a scale for w, the cast of x included."""
    y = _static_fp8_product(inputs["x"], _static_copy(inputs), inputs.get("bias"))
    return {"y": y, "rounding": reference.E4M3_ROUNDING}


def scaled_mm_rowwise(inputs: Inputs, _config: None) -> Outputs:
    """Run torch's product with a scale for every token and every row of w, the cast of x included."""
    y = _fp8_product(inputs["x"], _by_row(inputs["forms"]), inputs.get("bias"))
    return {"y": y, "rounding": reference.E4M3_ROUNDING}


OP = Op(
    name="int4_fastest_gemm",
    axes=("N", "M", "K"),
    dtypes=("bfloat16", "float16"),
    quants=("int4",),
    options=reference.OPTIONS | {"fp8_copy": (True, False, "static")},
    free_axes=("N",),  # the crossover depends on the weight
    bands={"N": (16, 32, 64, 96, 128)},
    free_options=("group", "zeros", "bias", "fp8_copy"),
    unseen_options=(),
    flops=reference.flops,
    inputs=inputs,
    reference=reference.reference,
    compare=reference.compare,
    traffic=reference.traffic,
    variants=(
        Variant("baseline", partial(run_product, "int4_gemm"), unsupported=configs.unsupported),
        Variant("optimized", run, ProductConfig, space, invalid, default, configs.unsupported),
        Variant("int4_fp8", partial(run_product, "int4_fp8_gemm"), unsupported=configs.unsupported),
        Variant("dequantised", peers.dequantised, unsupported=reference.not_empty, requires=("torch",)),
        Variant("scaled_mm_rowwise", scaled_mm_rowwise, unsupported=peers.not_scaled_mm, requires=("torch",)),
        Variant("scaled_mm_static", scaled_mm_static, unsupported=peers.not_scaled_mm, requires=("torch",)),
    ),
    module=__name__,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
