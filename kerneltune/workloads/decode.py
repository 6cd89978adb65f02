"""Norms and products of decoder layers for the tokens of a decoding step, with weights of 16, 8 and 4 bits.

    total += previous      h = norm(total)      qkv = h · wᵀ      total += attended · wᵀ
    h = norm(total)        gate, up = h · wᵀ    previous = (silu(gate) * up) · wᵀ

Attention is left out: its time depends on the length of the context alone. `attended` is an input in the place of its
result. Every variant has the same weights: codes of four bits, or the values of these codes cast to e4m3 or rounded to bf16.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kerneltune.compat import scaled_mm
from kerneltune.kernel_lib.tl_lib import FP8_MAX
from kerneltune.ops.int4_gemm import fastest, int4_fp8_gemm, norm_tokens, packing
from kerneltune.ops.rmsnorm import rmsnorm_add_fwd, rmsnorm_fwd
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant

_16_BITS, _CAST = (0.03, 0.15), (0.3, 1.5)
"""Noise and largest error against fp32, in parts of a token's root mean square, of products in 16 bits and of e4m3 tokens.

Four layers of width 1024 with 64 tokens had 0.014 and 0.057, and 0.17 and 0.77."""
_MOST_NORM = 16.0
"""Largest magnitude of a norm's output that a scale known in advance allows; of 128 tokens none is above 6."""
_GROUP = 128

Product = Callable[[Inputs, Any], Tensor]
"""Multiply an operand by the weight of a linear layer, given as the inputs of `int4_gemm`."""


def _linears(hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of each product of a layer."""
    attention = {"qkv": ((heads + 2 * kv_heads) * head_dim, hidden), "o": (hidden, heads * head_dim)}
    return attention | {"gate-up": (2 * mlp, hidden), "down": (hidden, mlp)}


SHAPES = {
    "llama-3-8b": _linears(4096, 32, 8, 128, 14336),
    "llama-3-70b": _linears(8192, 64, 8, 128, 28672),
    "qwen3-32b": _linears(5120, 64, 8, 128, 25600),
    "tiny": _linears(128, 4, 1, 32, 256),
}
"""Model -> linear layer -> (outputs, inputs)."""


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw x (N, hidden) bf16, and for each layer the inputs of four products; x of `o` is `attended`."""
    linears, layers = SHAPES[str(case.option("model"))], []
    for layer in range(case["L"]):
        drawn = {}
        for at, (name, (rows, depth)) in enumerate(linears.items()):
            options = (("group", _GROUP), ("zeros", False), ("bias", False), ("fp8_copy", True))
            product = Case("", (("N", case["N"]), ("M", rows), ("K", depth)), "bfloat16", "int4", options)
            drawn[name] = fastest.OP.inputs(product, device=device, seed=1000 * seed + 10 * layer + at)
            _center(drawn[name]["packed"])
        layers.append(drawn)
    hidden = linears["o"][0]
    x = torch.empty((case["N"], hidden), dtype=torch.bfloat16, device=device)
    if device != "meta":
        x.normal_(generator=torch.Generator(device=device).manual_seed(1000 * seed + 999))
    scale = torch.full((1,), FP8_MAX["e4m3"] / _MOST_NORM, device=device)
    norm, amax = torch.ones(hidden, dtype=torch.bfloat16, device=device), torch.zeros(1, device=device)
    return {"x": x, "layers": layers, "norm": norm, "scale": scale, "amax": amax}


def _center(packed: Tensor) -> None:
    """Replace the codes 0 by 8, so that weights have no mean.

    Weights with a mean make all elements of a product alike; the sign of their square then decides the next layer, and
    rounding decides the sign.
    """
    if packed.is_meta:
        return
    for words in packed:
        any_of_two = words | (words >> 1)
        words |= (~(any_of_two | (any_of_two >> 2)) & 0x11111111) << 3


def reference(inputs: Inputs) -> Outputs:
    """Return qkv of the last layer, and the sum of the residual and the last product, in fp32."""
    total = inputs["x"].float()
    qkv = total
    for layer in inputs["layers"]:
        qkv, attended = _exact(layer["qkv"], _norm32(total)), layer["o"]["x"].float()
        total = total + _exact(layer["o"], attended)
        gate, up = _exact(layer["gate-up"], _norm32(total)).chunk(2, 1)
        total = total + _exact(layer["down"], F.silu(gate) * up)
    return {"qkv": qkv, "y": total}


def _norm32(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6)


def _exact(linear: Inputs, x: Tensor) -> Tensor:
    return x @ packing.dequantise(linear["weight"], torch.bfloat16).float().t()


def compare(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare the noise of each token, and its largest error, with the token's root mean square.

    Variants that cast tokens state it as the output `is_cast`.
    """
    errors, allowed = [], _CAST if outputs["is_cast"] else _16_BITS
    for name, want in expected.items():
        error = (outputs[name].float() - want) / want.square().mean(1, keepdim=True).sqrt()
        found = float(error.square().mean(1).sqrt().max()), float(error.abs().max())
        if not (found[0] <= allowed[0] and found[1] <= allowed[1]):
            said = f"noise {found[0]:.3g}, largest error {found[1]:.3g} of a token's root mean square"
            errors.append(f"{name}: {said}, expected at most {allowed[0]:g} and {allowed[1]:g}")
    return errors


def traffic(case: Case) -> Traffic:
    """Return the bytes of codes and scales read, and of the results of the products written and read."""
    linears = SHAPES[str(case.option("model"))].values()
    weights = sum(rows * depth // 2 + 2 * rows * depth // _GROUP for rows, depth in linears)
    results = sum(2 * case["N"] * rows for rows, _ in linears)
    return Traffic(case["L"] * (weights + results), case["L"] * results)


def flops(case: Case) -> int:
    """Return two operations for every weight and token."""
    return 2 * case["N"] * case["L"] * sum(rows * depth for rows, depth in SHAPES[str(case.option("model"))].values())


def run(product: Product, is_cast: bool, quant: str, inputs: Inputs, _config: None) -> Outputs:
    """Run the layers with a product.

    Args:
        is_cast: whether the product casts tokens to e4m3.
        quant: quantization mode of the norms; under `fp8` the product gets their e4m3 result with its scale.
    """
    total, norm, qkv = inputs["x"], inputs["norm"], inputs["x"]
    of_cast = {"scale": inputs["scale"], "amax": inputs["amax"]} if quant == "fp8" else {}
    options: dict[str, Any] = {"quant": quant, **of_cast}
    made: Any = rmsnorm_fwd(total, norm, **options)
    for layer in inputs["layers"]:
        qkv = product(layer["qkv"], made if quant == "fp8" else made.y)
        made = rmsnorm_add_fwd(product(layer["o"], layer["o"]["x"]), total, norm, **options)
        gate, up = product(layer["gate-up"], made if quant == "fp8" else made.y).chunk(2, 1)
        made = rmsnorm_add_fwd(product(layer["down"], F.silu(gate) * up), made.total, norm, **options)
        total = made.total
    return {"qkv": qkv, "y": total, "is_cast": is_cast}


def run_cast_by_norms(inputs: Inputs, _config: None) -> Outputs:
    """Run the layers with `int4_fp8_gemm`; the norms write its tokens in e4m3, other tokens are cast first."""
    total: Tensor = inputs["x"]
    qkv, norm = total, inputs["norm"]
    tokens = norm_tokens(total, norm)
    for layer in inputs["layers"]:
        weight = {name: linear["weight"] for name, linear in layer.items()}
        qkv = int4_fp8_gemm(tokens, weight["qkv"])
        tokens, total = norm_tokens(int4_fp8_gemm(layer["o"]["x"], weight["o"]), norm, residual=total)
        gate, up = int4_fp8_gemm(tokens, weight["gate-up"]).chunk(2, 1)
        tokens, total = norm_tokens(int4_fp8_gemm(F.silu(gate) * up, weight["down"]), norm, residual=total)
    return {"qkv": qkv, "y": total, "is_cast": True}


def _of_int4(name: str, linear: Inputs, x: Tensor) -> Tensor:
    """Multiply by a variant of `int4_fastest_gemm`, with the best known config."""
    y: Tensor = fastest.OP.variant(name).run({**linear, "x": x}, None)["y"]
    return y


def _of_norm(linear: Inputs, x: Any) -> Tensor:
    """Multiply e4m3 tokens of a norm by an fp8 weight, each with a scale for the tensor; cast other tokens first."""
    if isinstance(x, Tensor):
        return _of_int4("scaled_mm_static", linear, x)
    w, w_scale = linear["forms"].other("e4m3", lambda forms: packing.to_e4m3(forms.dequantised, by_row=False))
    y: Tensor = scaled_mm(x.y, w.t(), x.scale_inv, w_scale, out_dtype=torch.bfloat16, use_fast_accum=True)
    return y


def _variant(name: str, product: Product | str, is_cast: bool, quant: str = "none", is_peer: bool = False) -> Variant:
    """Return a variant; product: a function, or a variant of `int4_fastest_gemm`."""
    multiply = partial(_of_int4, product) if isinstance(product, str) else product
    return Variant(name, partial(run, multiply, is_cast, quant), requires=("torch",) if is_peer else ())


OPS = (
    Op(
        name="decode_step",
        axes=("N", "L"),
        dtypes=("bfloat16",),
        quants=("int4",),
        options={"model": tuple(SHAPES)},
        inputs=inputs,
        reference=reference,
        compare=compare,
        traffic=traffic,
        flops=flops,
        module=__name__,
        variants=(
            _variant("baseline", "dequantised", False, is_peer=True),
            _variant("optimized", "optimized", True),
            _variant("int4_gemm", "baseline", False),
            _variant("int4_fp8_gemm", "int4_fp8", True),
            Variant("int4_fp8_norm", run_cast_by_norms),
            _variant("fp8_rowwise", "scaled_mm_rowwise", True, is_peer=True),
            _variant("fp8_static", "scaled_mm_static", True, is_peer=True),
            _variant("fp8_norm", _of_norm, True, quant="fp8", is_peer=True),
        ),
    ),
)
