"""Peers of the products with dense weights: torch's."""

import torch

from kerneltune.ops.dense_gemm.reference import not_empty
from kerneltune.spec import Case, Inputs, Outputs, Variant


def torch_mm(inputs: Inputs, _config: None) -> Outputs:
    """Run torch's matrix product."""
    return {"y": inputs["x"] @ inputs["w"].t()}


def torch_scaled_mm(inputs: Inputs, _config: None) -> Outputs:
    """Run torch's scaled matrix product: one scale per tensor, fast accumulation."""
    y = torch._scaled_mm(
        inputs["x"],
        inputs["w"].t(),
        scale_a=inputs["x_scale"],
        scale_b=inputs["w_scale"],
        out_dtype=inputs["out_dtype"],
        use_fast_accum=True,
    )
    return {"y": y}


def not_scaled_mm(case: Case) -> str | None:
    """Refuse cases that `_scaled_mm` does not support: it needs a GPU and sizes that are multiples of 16."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    return "needs M and K to be multiples of 16" if case["M"] % 16 or case["K"] % 16 else not_empty(case)


MM = Variant("torch", torch_mm, unsupported=not_empty, requires=("torch",))
SCALED_MM = Variant("scaled_mm", torch_scaled_mm, unsupported=not_scaled_mm, requires=("torch",))
