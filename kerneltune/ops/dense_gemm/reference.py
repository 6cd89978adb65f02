"""Inputs, the formula in fp64, and what a user would pick instead. No kernels here. May import torch."""

import torch

from kerneltune.kernel_lib.agreement import close
from kerneltune.spec import Case, Inputs, Outputs, Traffic

_FP8_STEP, _FP8_STEPS = 2.0**-14, 256
"""How far sums of fp8 products may be off: the tensor cores cut the running sum to 14 bits (Hopper), once for every 32 k; 256
times where that is seldom."""
_CHUNK_ROWS = 4096


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """x (N, K) and w (M, K), in fp8 with scales x_scale and w_scale (1,); out_dtype."""
    N, M, K, dtype = case["N"], case["M"], case["K"], getattr(torch, case.dtype)
    held = torch.float8_e4m3fn if case.quant == "fp8" else dtype
    if device == "meta":
        found = {"x": torch.empty((N, K), dtype=held, device=device), "w": torch.empty((M, K), dtype=held, device=device)}
    else:
        generator = torch.Generator(device=device).manual_seed(seed)
        x, w = (torch.randn(s, generator=generator, device=device, dtype=torch.bfloat16) for s in ((N, K), (M, K)))
        found = {"x": x.to(held), "w": w.to(held)}
    if case.quant == "fp8":
        found |= {name: torch.full((1,), scale, device=device) for name, scale in (("x_scale", 0.5), ("w_scale", 1 / 48))}
    return found | {"out_dtype": dtype}


def reference(inputs: Inputs) -> Outputs:
    """y in fp64; spread, the root of the sum of the squares of the products that it adds up."""
    x, w = inputs["x"].double(), inputs["w"]
    scale = float(inputs["x_scale"]) * float(inputs["w_scale"]) if "x_scale" in inputs else 1.0
    parts = [w[start : start + _CHUNK_ROWS].double() for start in range(0, w.shape[0], _CHUNK_ROWS)]
    y = torch.cat([x @ part.t() for part in parts], 1) * scale
    spread = torch.cat([(x.square() @ part.square().t()).sqrt() for part in parts], 1) * scale
    return {"y": y, "spread": spread}


def compare(case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Every element, within the rounding of the result and of the sums."""
    off = _FP8_STEP * max(_FP8_STEPS, case["K"] / 32) if "x_scale" in inputs else 2.0**-14
    if outputs["y"].dtype != inputs["out_dtype"]:
        return [f"y: {outputs['y'].dtype}, expected {inputs['out_dtype']}"]
    unit = torch.finfo(inputs["out_dtype"]).eps * (0.5 if outputs["y"].is_cuda else 1)  # Triton's interpreter truncates bf16
    magnitude = expected["spread"] + expected["y"].abs()  # of a running sum
    return close("y", outputs["y"], expected["y"].float(), unit, (off * magnitude).float())


def traffic(case: Case) -> Traffic:
    """x, w and scales read, y written."""
    N, M, K, fp8 = case["N"], case["M"], case["K"], case.quant == "fp8"
    return Traffic((1 if fp8 else 2) * (N + M) * K + (8 if fp8 else 0), 2 * N * M)


def flops(case: Case) -> int:
    """Two for every weight and token."""
    return 2 * case["N"] * case["M"] * case["K"]


def torch_mm(inputs: Inputs, _config: None) -> Outputs:
    """torch's matrix product."""
    return {"y": inputs["x"] @ inputs["w"].t()}


def torch_scaled_mm(inputs: Inputs, _config: None) -> Outputs:
    """torch's scaled matrix product, one scale per tensor, fast accumulation."""
    y = torch._scaled_mm(
        inputs["x"],
        inputs["w"].t(),
        scale_a=inputs["x_scale"],
        scale_b=inputs["w_scale"],
        out_dtype=inputs["out_dtype"],
        use_fast_accum=True,
    )
    return {"y": y}


def not_empty(case: Case) -> str | None:
    """An empty product is not worth a call."""
    return "no rows" if case["N"] == 0 else None


def not_scaled_mm(case: Case) -> str | None:
    """`_scaled_mm` needs a GPU and sizes that are multiples of 16."""
    if not torch.cuda.is_available():
        return "needs a GPU"
    return "needs M and K to be multiples of 16" if case["M"] % 16 or case["K"] % 16 else not_empty(case)
