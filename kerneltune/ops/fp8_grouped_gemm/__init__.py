"""Grouped products of fp8 matrices, what a mixture of experts trains with: forward, input gradient, weight gradient.

Formula: reference.py. Source: torch's _scaled_grouped_mm and _grouped_mm, and their layouts.
"""

from kerneltune.ops.fp8_grouped_gemm import configs, reference, scaled_mm
from kerneltune.ops.fp8_grouped_gemm.configs import CUTLASS, GemmConfig
from kerneltune.ops.fp8_grouped_gemm.product import fp8_grouped_gemm
from kerneltune.spec import Inputs, Op, Outputs, Variant

__all__ = ["CUTLASS", "OPS", "GemmConfig", "fp8_grouped_gemm", "run"]


def run(inputs: Inputs, config: GemmConfig | None) -> Outputs:
    """Run `fp8_grouped_gemm` on a case's inputs."""
    tensors = (inputs[name] for name in ("a", "b", "scale_a", "scale_b", "offs"))
    return {"out": fp8_grouped_gemm(*tensors, out_dtype=inputs["out_dtype"], aligned=inputs["aligned"], config=config)}


OPS = (
    Op(
        name="fp8_grouped_gemm",
        axes=("M", "N", "K", "E"),
        dtypes=("bfloat16", "float16", "float32"),
        quants=("fp8",),
        options=reference.OPTIONS,
        free_axes=("M", "E"),
        free_options=("scales", "groups", "values"),
        as_called=reference.as_called,
        inputs=reference.inputs,
        reference=reference.reference,
        compare=reference.compare,
        traffic=reference.traffic,
        flops=reference.flops,
        module=__name__,
        variants=(
            Variant("baseline", scaled_mm.run_scaled, unsupported=scaled_mm.not_torch),
            Variant("optimized", run, GemmConfig, configs.space, configs.valid, configs.default, promising=configs.promising),
            Variant("torch_bf16", scaled_mm.run_bf16, unsupported=scaled_mm.not_torch, requires=("torch",)),
        ),
    ),
)
