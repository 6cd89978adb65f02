"""Multiply by weights of four bits with the product that is the fastest for the tokens; axes and formula as in `int4_gemm`.

Four products take the same tokens: `int4_gemm` of 16 bits, `int4_fp8_gemm` of e4m3, and two of torch's in fp8, whose weight is a
copy in e4m3. The product is a knob, so that a search on a GPU finds from how many tokens on each is the fastest.
"""

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
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Variant

PRODUCTS = ("int4_gemm", "int4_fp8_gemm", "fp8", "fp8_scaled")
"""Names of the products. `fp8`: torch's product with a scale for every token and every row of w. `fp8_scaled`: torch's product
with one scale, whose result is scaled by token and row in a launch of its own; rounded to bf16 in between."""
_FP8_PRODUCTS = ("fp8", "fp8_scaled")
"""Products that read the weight in e4m3."""
_MOST_ELEMENTS = ((16, 250_000_000), (32, 110_000_000), (48, 40_000_000), (64, 20_000_000), (128, 10_000_000))
"""Elements of w below which `int4_gemm` is the fastest for so many tokens or fewer (H200, 2026-11-26, 19 weights)."""
_CAST_BLOCK = 1024
"""Elements that a program casts by a known multiplier, or scales."""


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
        scale: (M,) float32: an element of w is its q times the scale of its row.
    """

    q: torch.Tensor
    scale: torch.Tensor


def to_fp8(w: torch.Tensor) -> Fp8Weight:
    """Cast w (M, K) to e4m3 with a scale for each row.

    Raises:
        ValueError: sizes that are not multiples of 16, which torch's product needs.
    """
    if w.shape[0] % 16 or w.shape[1] % 16:
        raise ValueError(f"w must have multiples of 16 rows and columns for a product in fp8, got {tuple(w.shape)}")
    return Fp8Weight(*to_e4m3(w, by_row=True))


def _fp8_product(x: torch.Tensor, w: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return torch's product of x, cast to e4m3, and a weight in e4m3."""
    tokens = fp8_gemm.cast_tokens(x, reorder=False)
    q, scales = tokens.q[:, : x.shape[1]], (tokens.scale[:, None], w.scale[None, :])
    y = scaled_mm(q, w.q.t(), *scales, out_dtype=x.dtype, use_fast_accum=True)
    return y if bias is None else y + bias


def _scaled_fp8_product(x: torch.Tensor, w: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return torch's product with one scale of x, cast to e4m3, and a weight in e4m3, scaled by token and row in a launch.

    Both operands get the scale of row 0, which needs no memory of its own; the last launch divides by its square.
    """
    (N, K), M = x.shape, w.q.shape[0]
    if not N:
        return x.new_empty((N, M))
    tokens, first = fp8_gemm.cast_tokens(x, reorder=False), w.scale[:1]
    sums = scaled_mm(tokens.q[:, :K], w.q.t(), first, first, out_dtype=torch.bfloat16, use_fast_accum=True)
    y = sums if x.dtype == torch.bfloat16 else torch.empty_like(sums, dtype=x.dtype)
    scale_sums[(cdiv(M, _CAST_BLOCK), N)](
        sums, tokens.scale, w.scale, y if bias is None else bias, y, M, BIAS=bias is not None, BLOCK=_CAST_BLOCK, num_warps=4,
        **({"launch_pdl": True} if since_sm_90() else {}),
    )  # fmt: skip
    return y


@on_its_device
def fastest_gemm(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    fp8_weight: Fp8Weight | None = None,
    *,
    config: ProductConfig | None = None,
) -> torch.Tensor:
    """Return x · wᵀ + bias by the fastest of four products. On GPUs before Hopper x stays in 16 bits.

    Args:
        x: (N, K) fp16 or bf16; rows may be any distance apart, elements of a row must be adjacent.
        weight: w (M, K), from `pack`, with scales and zero points of x's type.
        bias: (M,) of x's type, or None.
        fp8_weight: the same weight in e4m3, for many tokens; None if there is no memory for it.
        config: None takes the best known product.

    Returns:
        (N, M) of x's type, contiguous. The same inputs and config give the same bits.
    """
    gemm.check(x, weight, bias)
    if not (INTERPRETED or since_sm_90()):
        return gemm.int4_gemm(x, weight, bias)
    if config is None:
        options = {"bias": bias is not None, "fp8_copy": fp8_weight is not None}
        config = gemm.look_up(_choose, x.shape[0], weight, x.dtype, **options)
    c: ProductConfig = config
    if c.product == "int4_gemm":
        return gemm.int4_gemm(x, weight, bias)
    if c.product == "int4_fp8_gemm":
        return fp8_gemm.int4_fp8_gemm(x, weight, bias)
    if c.product not in PRODUCTS or fp8_weight is None:
        raise ValueError(f"config={c}: expected one of {', '.join(PRODUCTS)}, those of fp8 with the weight in fp8")
    check_like("fp8_weight.q", fp8_weight.q, (weight.rows, weight.depth), torch.float8_e4m3fn, x.device)
    check_like("fp8_weight.scale", fp8_weight.scale, (weight.rows,), torch.float32, x.device)
    return (_fp8_product if c.product == "fp8" else _scaled_fp8_product)(x, fp8_weight, bias)


def space(_case: Case) -> Space:
    """Offer every product."""
    return {"product": PRODUCTS}


def invalid(case: Case, config: ProductConfig) -> str | None:
    """Say why a product cannot run."""
    if config.product not in PRODUCTS:
        return f"product {config.product}, which is none of {', '.join(PRODUCTS)}"
    return _not_in_fp8(case) if config.product in _FP8_PRODUCTS else None


def _not_in_fp8(case: Case) -> str | None:
    """Say why torch's product in fp8 cannot run."""
    return peers.not_scaled_mm(case) if case.option("fp8_copy") else "no weight in fp8"


def default(case: Case) -> ProductConfig:
    """Return a product for any shape, by rule.

    The bounds fit the times of 19 weights with 16 to 256 tokens, casts included (H200, 2026-11-26).
    """
    tokens, rows, depth = case["N"], case["M"], case["K"]
    most = next((elements for limit, elements in _MOST_ELEMENTS if tokens <= limit), 0)
    if rows * depth < most:
        return ProductConfig("int4_gemm")
    is_tall = rows < 8000 and depth >= 7000 and rows * depth < 100_000_000
    reads_fp8 = tokens > 128 or (tokens > 64 and depth >= 2000) or (tokens > 48 and is_tall)
    fp8 = ProductConfig("fp8_scaled" if (rows < 10_000 and tokens <= 512) or 128 < tokens < 256 else "fp8")
    return fp8 if reads_fp8 and invalid(case, fp8) is None else ProductConfig("int4_fp8_gemm")


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw the inputs of `int4_gemm`; fp8_copy as in the case."""
    return {**reference.inputs(case, device=device, seed=seed), "fp8_copy": case.option("fp8_copy")}


def _copy(inputs: Inputs) -> Fp8Weight | None:
    """Return the weight in e4m3, made at its first use; None if the case or the sizes leave it out."""
    weight = inputs["weight"]
    if not inputs["fp8_copy"] or weight.rows % 16 or weight.depth % 16:
        return None
    copy: Fp8Weight = inputs["forms"].other("fp8", lambda forms: to_fp8(forms.dequantised))
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
    x = inputs["x"]
    w, w_scale, x_scale, multiplier = inputs["forms"].other("static", lambda forms: _static_operands(x, forms.dequantised))
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    early = {"launch_pdl": True} if since_sm_90() else {}
    cast_by[(cdiv(x.numel(), _CAST_BLOCK),)](x, q, multiplier, x.numel(), BLOCK=_CAST_BLOCK, num_warps=4, **early)
    y = scaled_mm(q, w.t(), x_scale, w_scale, out_dtype=x.dtype, use_fast_accum=True)
    return {"y": y + inputs["bias"] if "bias" in inputs else y, "rounding": reference.E4M3_ROUNDING}


def _static_operands(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return w in e4m3, its scale, the scale of x, and the reciprocal of that."""
    _, x_scale = to_e4m3(x, by_row=False)
    return *to_e4m3(w, by_row=False), x_scale, 1 / x_scale


OP = Op(
    name="int4_fastest_gemm",
    axes=("N", "M", "K"),
    dtypes=("bfloat16", "float16"),
    quants=("int4",),
    options=reference.OPTIONS | {"fp8_copy": (True, False)},
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
        Variant("scaled_mm_rowwise", partial(run_product, "fp8"), unsupported=_not_in_fp8, requires=("torch",)),
        Variant("scaled_mm_static", scaled_mm_static, unsupported=peers.not_scaled_mm, requires=("torch",)),
    ),
    module=__name__,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
