"""Multiply by weights of four bits with the product that is the fastest for the tokens; axes and formula as in `int4_gemm`.

Three products take the same tokens: `int4_gemm` of 16 bits, `int4_fp8_gemm` of e4m3, and torch's product in fp8, whose weight is
a copy in e4m3. The product is a knob, so that a search on a GPU finds from how many tokens on each is the fastest.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kerneltune import cache
from kerneltune.compat import scaled_mm
from kerneltune.kernel_lib.agreement import close
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, check_like
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.kernel_lib.tl_lib import INTERPRETED, since_sm_90
from kerneltune.ops.int4_gemm import configs, fp8_gemm, gemm, peers, reference
from kerneltune.ops.int4_gemm.kernels.fp8 import cast_by
from kerneltune.ops.int4_gemm.packing import Int4Weight
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Variant

PRODUCTS = ("int4_gemm", "int4_fp8_gemm", "fp8")
"""Names of the products; `fp8` is torch's product with a scale for every token and every row of w."""
ROUNDING = 2.0**-4
"""Largest relative error of rounding to e4m3, which has three bits of mantissa."""
_CAST_BLOCK = 1024
"""Elements that a program casts by a known multiplier."""


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
    scale = w.abs().amax(1).float().clamp(min=1e-12) / 448
    return Fp8Weight((w.float() / scale[:, None]).to(torch.float8_e4m3fn), scale)


def _fp8_product(x: torch.Tensor, w: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """Return torch's product of x, cast to e4m3, and a weight in e4m3."""
    tokens = fp8_gemm.cast_tokens(x, reorder=False)
    q, scales = tokens.q[:, : x.shape[1]], (tokens.scale[:, None], w.scale[None, :])
    y = scaled_mm(q, w.q.t(), *scales, out_dtype=x.dtype, use_fast_accum=True)
    return y if bias is None else y + bias


@on_its_device
def fastest_gemm(
    x: torch.Tensor,
    weight: Int4Weight,
    bias: torch.Tensor | None = None,
    fp8_weight: Fp8Weight | None = None,
    *,
    config: ProductConfig | None = None,
) -> torch.Tensor:
    """Return x · wᵀ + bias by the fastest of three products. On GPUs before Hopper x stays in 16 bits.

    Args:
        x: (N, K) fp16 or bf16; rows may be any distance apart, elements of a row must be adjacent.
        weight: w (M, K), from `pack`, with scales and zero points of x's type.
        bias: (M,) of x's type, or None.
        fp8_weight: the same weight in e4m3, for many tokens; None if there is no memory for it.
        config: None takes the best known product.

    Returns:
        (N, M) of x's type, contiguous. The same inputs and config give the same bits.

    Raises:
        ValueError: a shape, stride, type or device that does not fit, or a product that is unknown or lacks its weight.
    """
    gemm.check(x, weight, bias)
    if not (INTERPRETED or since_sm_90()):
        return gemm.int4_gemm(x, weight, bias)
    c: ProductConfig = _best_config(x, weight, bias is not None, fp8_weight is not None) if config is None else config
    if c.product == "int4_gemm":
        return gemm.int4_gemm(x, weight, bias)
    if c.product == "int4_fp8_gemm":
        return fp8_gemm.int4_fp8_gemm(x, weight, bias)
    if c.product != "fp8" or fp8_weight is None:
        raise ValueError(f"config={c}: expected one of {', '.join(PRODUCTS)}, fp8 with the weight in fp8")
    check_like("fp8_weight.q", fp8_weight.q, (weight.rows, weight.depth), torch.float8_e4m3fn, x.device)
    check_like("fp8_weight.scale", fp8_weight.scale, (weight.rows,), torch.float32, x.device)
    return _fp8_product(x, fp8_weight, bias)


def _best_config(x: torch.Tensor, weight: Int4Weight, bias: bool, fp8_copy: bool) -> Any:
    """Return the cached product for these sizes, or the default."""
    axes = (("N", x.shape[0]), ("M", weight.rows), ("K", weight.depth))
    options = (("group", gemm.group_option(weight)), ("zeros", weight.zeros is not None), ("bias", bias), ("fp8_copy", fp8_copy))
    return _choose(axes, DTYPE_NAMES[x.dtype], "int4", options)


def space(_case: Case) -> Space:
    """Offer every product."""
    return {"product": PRODUCTS}


def valid(case: Case, config: ProductConfig) -> str | None:
    """Say why a product cannot run."""
    if config.product not in PRODUCTS:
        return f"product {config.product}, which is none of {', '.join(PRODUCTS)}"
    return _not_in_fp8(case) if config.product == "fp8" else None


def _not_in_fp8(case: Case) -> str | None:
    """Say why torch's product in fp8 cannot run."""
    return peers.not_scaled_mm(case) if case.option("fp8_copy") else "no weight in fp8"


def default(case: Case) -> ProductConfig:
    """Return a product for any shape, by rule.

    The bounds fit the times of ten weights with 16 to 256 tokens, casts included (H200, 2026-11-26).
    """
    tokens, rows, depth = case["N"], case["M"], case["K"]
    size = rows * depth
    if tokens <= 32 or (tokens <= 64 and size < 20_000_000) or (tokens <= 128 and size < 10_000_000):
        return ProductConfig("int4_gemm")
    is_large = tokens > 128 or (tokens > 64 and rows >= 7000 and depth >= 2048)
    fp8 = ProductConfig("fp8")
    return fp8 if is_large and valid(case, fp8) is None else ProductConfig("int4_fp8_gemm")


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw the inputs of `int4_gemm`; fp8_copy as in the case."""
    return {**reference.inputs(case, device=device, seed=seed), "fp8_copy": case.option("fp8_copy")}


def compare(case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare every element within the rounding of the result and of the operands.

    A variant that casts operands states their largest relative error as the output `rounding`. Without it, y is compared as that
    of `int4_gemm`.
    """
    if "rounding" not in outputs:
        return reference.compare(case, inputs, outputs, expected)
    rtol, atol = torch.finfo(inputs["x"].dtype).eps, 6 * outputs["rounding"] * expected["spread"].float()
    return close("y", outputs["y"], expected["y"].float(), rtol, atol)


def _copy(inputs: Inputs) -> Fp8Weight | None:
    """Return the weight in e4m3, made at its first use; None if the case or the sizes leave it out."""
    weight = inputs["weight"]
    if not inputs["fp8_copy"] or weight.rows % 16 or weight.depth % 16:
        return None
    copy: Fp8Weight = inputs["forms"].other("fp8", lambda forms: to_fp8(forms.dequantised))
    return copy


def run(inputs: Inputs, config: ProductConfig | None) -> Outputs:
    """Run `fastest_gemm` on a case's inputs, casts of x included."""
    copy = _copy(inputs) if config is None or config.product == "fp8" else None
    y = fastest_gemm(inputs["x"], inputs["weight"], inputs.get("bias"), copy, config=config)
    return {"y": y} if config is not None and config.product == "int4_gemm" else {"y": y, "rounding": ROUNDING}


def run_on_16_bits(inputs: Inputs, _config: None) -> Outputs:
    """Run `int4_gemm`, which does not cast x."""
    return run(inputs, ProductConfig("int4_gemm"))


def run_on_fp8(inputs: Inputs, _config: None) -> Outputs:
    """Run `int4_fp8_gemm`, the cast of x included."""
    return run(inputs, ProductConfig("int4_fp8_gemm"))


def scaled_mm_rowwise(inputs: Inputs, _config: None) -> Outputs:
    """Run torch's product with a scale for every token and every row of w, the cast of x included."""
    return run(inputs, ProductConfig("fp8"))


def scaled_mm_static(inputs: Inputs, _config: None) -> Outputs:
    """Run torch's product with a scale for x, known in advance, and a scale for w, the cast of x included."""
    x = inputs["x"]
    w, w_scale, x_scale, multiplier = inputs["forms"].other("static", lambda forms: _static_operands(x, forms.dequantised))
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    early = {"launch_pdl": True} if since_sm_90() else {}
    cast_by[(cdiv(x.numel(), _CAST_BLOCK),)](x, q, multiplier, x.numel(), BLOCK=_CAST_BLOCK, num_warps=4, **early)
    y = scaled_mm(q, w.t(), x_scale, w_scale, out_dtype=x.dtype, use_fast_accum=True)
    return {"y": y + inputs["bias"] if "bias" in inputs else y, "rounding": ROUNDING}


def _static_operands(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return w in e4m3, its scale, the scale of x, and the reciprocal of that."""
    w_scale, x_scale = ((t.abs().max().float() / 448).reshape(1) for t in (w, x))
    return (w.float() / w_scale).to(torch.float8_e4m3fn), w_scale, x_scale, 1 / x_scale


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
    compare=compare,
    traffic=reference.traffic,
    variants=(
        Variant("baseline", run_on_16_bits, unsupported=configs.unsupported),
        Variant("optimized", run, ProductConfig, space, valid, default, configs.unsupported),
        Variant("int4_fp8", run_on_fp8, unsupported=configs.unsupported),
        Variant("dequantised", peers.dequantised, unsupported=reference.not_empty, requires=("torch",)),
        Variant("scaled_mm_rowwise", scaled_mm_rowwise, unsupported=_not_in_fp8, requires=("torch",)),
        Variant("scaled_mm_static", scaled_mm_static, unsupported=peers.not_scaled_mm, requires=("torch",)),
    ),
    module=__name__,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
