"""Inputs, formula in fp64 and tolerance of products with dense weights."""

import torch

from kerneltune.kernel_lib.agreement import close
from kerneltune.spec import Case, Inputs, Outputs, Traffic

_FP8_STEP, _FP8_STEPS = 2.0**-14, 256
"""How far sums of fp8 products may be off: the tensor cores cut the running sum to 14 bits (Hopper), once for every 32 k; 256
times where that is seldom."""
_CHUNK_ROWS = 4096


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw x (N, K) and w (M, K), in fp8 with scales x_scale and w_scale (1,); out_dtype."""
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
    """Return y in fp64, and spread, the root of the sum of the squares of the products that it adds up."""
    x, w = inputs["x"].double(), inputs["w"]
    scale = float(inputs["x_scale"]) * float(inputs["w_scale"]) if "x_scale" in inputs else 1.0
    parts = [w[start : start + _CHUNK_ROWS].double() for start in range(0, w.shape[0], _CHUNK_ROWS)]
    y = torch.cat([x @ part.t() for part in parts], 1) * scale
    spread = torch.cat([(x.square() @ part.square().t()).sqrt() for part in parts], 1) * scale
    return {"y": y, "spread": spread}


def compare(case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare every element, within the rounding of the result and of the sums."""
    off = _FP8_STEP * max(_FP8_STEPS, case["K"] / 32) if "x_scale" in inputs else 2.0**-14
    if outputs["y"].dtype != inputs["out_dtype"]:
        return [f"y: {outputs['y'].dtype}, expected {inputs['out_dtype']}"]
    unit = torch.finfo(inputs["out_dtype"]).eps / 2
    magnitude = expected["spread"] + expected["y"].abs()  # of a running sum
    return close("y", outputs["y"], expected["y"].float(), unit, (off * magnitude).float())


def traffic(case: Case) -> Traffic:
    """Return the bytes of x, w and scales read, and of y written."""
    N, M, K, fp8 = case["N"], case["M"], case["K"], case.quant == "fp8"
    return Traffic((1 if fp8 else 2) * (N + M) * K + (8 if fp8 else 0), 2 * N * M)


def flops(case: Case) -> int:
    """Return two operations for every weight and token."""
    return 2 * case["N"] * case["M"] * case["K"]


def not_empty(case: Case) -> str | None:
    """Refuse an empty product, which is not worth a call."""
    return "no rows" if case["N"] == 0 else None
