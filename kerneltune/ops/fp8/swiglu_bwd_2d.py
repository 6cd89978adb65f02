"""Differentiate SwiGLU of token groups and cast the result with one scale, for the gradients of the experts' first product.

    dx = swiglu_bwd(dy, x), rounded to x's type      q = fp8(dx' * s), as `fp8_tensorwise_2d` casts dx with one scale

The gradient is not written in x's type. Shares the config of `fp8_tensorwise_2d`. Source: the gated casts of
TransformerEngine.
"""

from functools import partial

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_like, check_matrix, check_transposable
from kerneltune.kernel_lib.compiled import DEFAULT, EAGER, call
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.groups import aligned_size
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.fp8 import contract, swiglu_2d
from kerneltune.ops.fp8.contract import Cast, fp8_dtype
from kerneltune.ops.fp8.kernels.gated import gate_and_cast
from kerneltune.ops.fp8.peers import not_torch
from kerneltune.ops.fp8.swiglu_2d import CALL_OPTIONS, CONTRACT
from kerneltune.ops.fp8.tensorwise_2d import SegmentConfig, SegmentOutput
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Traffic, Variant


def space(case: Case) -> Space:
    """Offer tiles whose rows divide the alignment of groups, and whose columns divide a half of a row."""
    return {
        "rows": (16, 32, 64, 128),
        "cols": tuple(cols for cols in (256, 128, 64, 32, 16) if case["N"] % cols == 0)[:3] or (1,),
        "warps": (2, 4, 8),
        "ctas": (0, 2, 3, 4),
        "stages": (1, 2),
    }


def invalid(case: Case, config: SegmentConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running: a thread loads three elements and casts two at a time."""
    if case["N"] % config.cols:
        return f"{config.cols} columns do not divide a half of {case['N']}"
    if config.rows * config.cols // (32 * config.warps) > 32:
        return f"{config.rows * config.cols // (32 * config.warps)} elements per thread"
    return swiglu_2d.invalid(case, config)


def unsupported(case: Case) -> str | None:
    """Say which sizes tiles cannot divide."""
    return f"N: {case['N']}: expected a multiple of 16" if case["N"] % 16 else None


def default(case: Case) -> SegmentConfig:
    """Return a config for any shape, by rule: 32 elements per thread, in a pipeline of two tiles where columns are wide."""
    cols = next((cols for cols in (128, 64, 32) if case["N"] % cols == 0), 16)
    if case.dtype == "float32" or cols < 32:
        rows = min(128, 4096 // cols)
        return SegmentConfig(rows=rows, cols=cols, warps=max(4, rows * cols // 512), ctas=0, stages=1)
    if cols == 32:
        return SegmentConfig(rows=128, cols=32, warps=4, ctas=0, stages=1)
    return SegmentConfig(rows=32 if cols == 128 else 64, cols=cols, warps=4, ctas=3, stages=2)


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw dy (M, N) and the inputs of `fp8_swiglu_2d`."""
    dy = contract.values((case["M"], case["N"]), getattr(torch, case.dtype), device, seed + 1)
    return {"dy": dy, **swiglu_2d.inputs(case, device=device, seed=seed)}


def reference(inputs: Inputs) -> Outputs:
    """Differentiate in fp32, term by term; NaN becomes 0, infinity the largest finite value."""
    dy, (gate, up) = inputs["dy"].float(), inputs["x"].float().chunk(2, dim=1)
    sigmoid = 1.0 / (1.0 + torch.exp(-gate))
    dx = torch.cat([dy * up * (sigmoid + gate * sigmoid * (1.0 - sigmoid)), dy * (gate * sigmoid)], dim=1)
    return {"y": torch.nan_to_num(dx.to(inputs["x"].dtype)), "terms": (dy * up).abs().nan_to_num(posinf=0.0)}


def compare(case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare as `fp8_swiglu_2d` does; terms that cancel leave their fp32 rounding errors."""
    terms = torch.cat([expected["terms"], torch.zeros_like(expected["terms"])], dim=1)
    return swiglu_2d.compare_cast(inputs["offs"], outputs, expected["y"], 1e-6 * terms.double())


def traffic(case: Case) -> Traffic:
    """Count the bytes of dy, x and offs read; of the layouts and the scale written."""
    elements = 2 * case["M"] * case["N"]
    aligned = aligned_size(case["M"], case["G"]) * 2 * case["N"] if case.option("layout") == "both" else 0
    return Traffic(3 * ITEMSIZE[case.dtype] * elements // 2 + 4 * case["G"], elements + aligned + 4)


def _results(x: torch.Tensor, offs: torch.Tensor, layout: str) -> SegmentOutput:
    swiglu_2d.check_layout(layout)
    (M, width), dtype = x.shape, fp8_dtype("e4m3", x.device)
    q_t = x.new_empty((width, aligned_size(M, offs.shape[0])), dtype=dtype).t() if layout == "both" else None
    return SegmentOutput(x.new_empty((M, width), dtype=dtype), q_t, x.new_empty((1,), dtype=torch.float32))


@torch_operator(_results)
@on_its_device
def fp8_swiglu_bwd_2d(
    dy: torch.Tensor, x: torch.Tensor, offs: torch.Tensor, *, layout: str = "both", config: SegmentConfig | None = None
) -> SegmentOutput:
    """Differentiate SwiGLU of token groups and cast to e4m3 with one scale, a power of two; NaN becomes 0, infinity is clamped.

    Args:
        dy: (M, N) of x's type, the gradient of the gated rows, elements of a row adjacent.
        x: (M, 2N), as `fp8_swiglu_2d` takes it, N a multiple of 16.
        offs: (G,) int32, as there.
        layout: `row`, or `both`: q_t as well.
        config: None takes the best known config.

    Returns:
        q (M, 2N), contiguous; q_t (aligned_size, 2N), column-major, or None: aligned groups; the inverse scale
        (1,).
    """
    swiglu_2d.check_operands(x, offs)
    check_matrix("dy", dy)
    M, N = x.shape[0], x.shape[1] // 2
    check_like("dy", dy, (M, N), x.dtype, x.device)
    if N % 16:
        raise ValueError(f"x must be (M, 2N), N a multiple of 16, got {tuple(x.shape)}")
    check_transposable("x", M)
    results, cast = _results(x, offs, layout), Cast("e4m3", pow2=True, inverse=True)
    if not x.numel():
        results.scale.fill_(cast.scale_of_nothing)
        return results
    if config is None:
        sizes = (("M", M), ("N", N), ("G", offs.shape[0]))
        config = _choose(sizes, DTYPE_NAMES[x.dtype], "fp8", (("layout", layout), *CALL_OPTIONS))
    assert results.q is not None
    gate_and_cast(dy, x, offs, results.q, results.q_t, results.scale, cast, config)
    return results


def _differentiated(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=1)
    return torch.cat([torch.ops.aten.silu_backward(dy * up, gate), dy * torch.nn.functional.silu(gate)], dim=1)


def _differentiate_then_cast(mode: str, inputs: Inputs, _config: None) -> Outputs:
    """Differentiate by torch in a mode of `call`, then cast by `fp8_tensorwise_2d`."""
    return swiglu_2d.cast_groups(call(_differentiated, mode, (inputs["dy"], inputs["x"])), inputs)


OP = Op(
    name="fp8_swiglu_bwd_2d",
    inputs=inputs,
    reference=reference,
    compare=compare,
    traffic=traffic,
    variants=(
        Variant("baseline", partial(_differentiate_then_cast, EAGER)),
        Variant("optimized", run_of(fp8_swiglu_bwd_2d), SegmentConfig, space, invalid, default, unsupported),
        Variant("compile", partial(_differentiate_then_cast, DEFAULT), unsupported=not_torch, requires=("torch",), compiles=True),
    ),
    module=__name__,
    **CONTRACT,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
