"""Values, formula, comparison, bytes and operations of grouped fp8 products. Shares no code with the kernels.

    out = (a @ b) * scale_a * scale_b for every group       a, b in e4m3, the sum in fp32, rounded once

Rows of tokens behind the last group are zeros.
"""

import math

import torch

from kerneltune.kernel_lib.agreement import close
from kerneltune.kernel_lib.arguments import ITEMSIZE
from kerneltune.kernel_lib.check_values import draw
from kerneltune.kernel_lib.groups import align_groups, aligned_size, aligned_starts, bounds, group_ends
from kerneltune.spec import Case, Inputs, Option, Outputs, Traffic

OPTIONS: dict[str, tuple[Option, ...]] = {
    "product": ("rows", "weights"),
    "scales": ("rowwise", "tensorwise"),
    "groups": ("balanced", "zipf", "ragged", "routed", "dropped"),
    "values": ("normal", "integers"),
}
"""The values of a case's options.

product: groups of rows of a times a matrix each, or the weight gradient, groups of its contraction. scales: one scale per
row and column, or per tensor and group. groups: see `group_ends`; weight gradients of `routed` groups are aligned. values:
normal, or integers whose sums are exact.
"""

_FAST_BITS = 2.0**-13
"""The part of the running sum that a step of 32 k may cut off in the tensor cores' fast accumulation."""
_MOST_ERROR = 1 / 64
_SCALE = 2.0**-6
"""The norm of the error over the norm of the result that is allowed: tensor cores cut running sums of fp8 to 14 bits. And
the middle of the scales that are drawn."""


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw the arguments of `fp8_grouped_gemm`."""
    M, N, K, E = (case[axis] for axis in ("M", "N", "K", "E"))
    weights, rowwise = case.option("product") == "weights", case.option("scales") == "rowwise"
    exact = case.option("values") == "integers"
    offs = group_ends(case, E, device, seed)
    aligned = weights and case.option("groups") == "routed"
    if weights:
        a, b = (_columns(_values((M, size), exact, device, seed + i), offs, aligned) for i, size in enumerate((N, K)))
        a, b = a, b.t()
    else:
        a = _values((M, K), exact, device, seed)
        b = _values((E, N, K), exact, device, seed + 1).transpose(-2, -1)
    if weights:
        sizes: tuple[tuple[int, ...], tuple[int, ...]] = ((E, N), (E, K)) if rowwise else ((E,), (E,))
    else:
        sizes = ((M,), (E, N)) if rowwise else ((1,), (E,))
    scale_a, scale_b = (_scales(size, device, seed + i) for i, size in enumerate(sizes))
    return {
        "a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "offs": offs, "aligned": aligned,
        "out_dtype": getattr(torch, case.dtype),
    }  # fmt: skip


def _values(shape: tuple[int, ...], exact: bool, device: str, seed: int) -> torch.Tensor:
    """Draw values as wide as quantization makes them: N(0, 64), or integers from -2 to 2."""
    if exact:
        return draw("random_", shape, torch.bfloat16, device, seed, 0, 5).sub_(2).to(torch.float8_e4m3fn)
    return draw("normal_", shape, torch.bfloat16, device, seed, 0, 64).clamp_(-448, 448).to(torch.float8_e4m3fn)


def _columns(x: torch.Tensor, offs: torch.Tensor, aligned: bool) -> torch.Tensor:
    """Return x (M, size) transposed, of aligned groups or with rows a multiple of 16 apart."""
    if aligned:
        if x.is_meta:
            return x.new_empty((x.shape[1], aligned_size(x.shape[0], offs.shape[0])))
        return align_groups(x.view(torch.uint8), offs).t().contiguous().view(x.dtype)
    rows = x.new_empty((x.shape[1], -(-x.shape[0] // 16) * 16))[:, : x.shape[0]]
    rows.view(torch.uint8).copy_(x.view(torch.uint8).t())
    return rows


def _scales(shape: tuple[int, ...], device: str, seed: int) -> torch.Tensor:
    """Draw powers of two, so that products with them are exact."""
    return torch.exp2(draw("random_", shape, torch.float32, device, seed, -3, 4)) * _SCALE


def reference(inputs: Inputs) -> Outputs:
    """Multiply group by group in fp32; beside it the largest error that fast accumulation explains."""
    a, b, dtype = inputs["a"], inputs["b"], inputs["out_dtype"]
    groups = bounds(inputs["offs"])
    if b.ndim == 3:
        out = torch.zeros(a.shape[0], b.shape[2], dtype=dtype, device=a.device)
        atol = torch.zeros(out.shape[0], out.shape[1], dtype=torch.bfloat16, device=a.device)
        for group, (start, end) in enumerate(groups):
            scale_a = inputs["scale_a"] if inputs["scale_a"].numel() == 1 else inputs["scale_a"][start:end, None]
            scale_b = inputs["scale_b"][group]
            out[start:end], atol[start:end] = _product(a[start:end], b[group], scale_a, scale_b, dtype)
    else:
        out = torch.zeros(len(groups), a.shape[0], b.shape[1], dtype=dtype, device=a.device)
        atol = torch.zeros(out.shape, dtype=torch.bfloat16, device=a.device)
        if inputs["aligned"]:
            starts = aligned_starts(inputs["offs"]).tolist()
            groups = [(to, to + end - start) for to, (start, end) in zip(starts, groups, strict=True)]
        for group, (start, end) in enumerate(groups):
            scale_a, scale_b = inputs["scale_a"][group, ..., None], inputs["scale_b"][group]
            out[group], atol[group] = _product(a[:, start:end], b[start:end], scale_a, scale_b, dtype)
    return {"out": out, "atol": atol}


def _product(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = a.float() * scale_a, b.float() * scale_b
    steps = math.ceil(x.shape[1] / 32)
    size = x.norm(dim=1)[:, None] * y.norm(dim=0) / max(1, x.shape[1]) ** 0.5  # typical size of a sum of the products
    return (x @ y).to(dtype), (4 * _FAST_BITS * steps * size).bfloat16()


def compare(case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare exact sums bit by bit; other sums within the errors of rounding and fast accumulation, and 1/64 of the norm."""
    got, want, atol = outputs["out"], expected["out"], expected["atol"]
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"out: {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"]
    rounding = torch.finfo(want.dtype).eps
    if case.option("values") == "integers":
        return close("out", got, want, 0.0, 0.0)
    errors = close("out", got, want, rounding, atol.float())
    error = (got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-30)
    if not bool(error <= _MOST_ERROR):
        errors.append(f"out: error of {float(error):.3g} of the whole")
    return errors


def traffic(case: Case) -> Traffic:
    """Return the bytes of operands, scales and group ends read; of the result written."""
    M, N, K, E = (case[axis] for axis in ("M", "N", "K", "E"))
    rowwise = case.option("scales") == "rowwise"
    if case.option("product") == "weights":
        scales = E * (N + K) if rowwise else 2 * E
        columns = aligned_size(M, E) if case.option("groups") == "routed" else M
        return Traffic(columns * (N + K) + 4 * (scales + E), ITEMSIZE[case.dtype] * E * N * K)
    scales = M + E * N if rowwise else 1 + E
    return Traffic(M * K + E * N * K + 4 * (scales + E), ITEMSIZE[case.dtype] * M * N)


def flops(case: Case) -> int:
    """Count a multiplication and an addition for every token, row and column."""
    return 2 * case["M"] * case["N"] * case["K"]
