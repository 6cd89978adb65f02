"""Gate token groups by SwiGLU and cast them with one scale, for the experts' second product and, transposed, its weight gradient.

    y = silu(gate) * up, rounded to x's type      q = fp8(y' * s) as `fp8_tensorwise_2d` casts y, s from the rows of all groups

The gated values are not written. Shares the config of `fp8_tensorwise_2d`. Source: the gated casts of TransformerEngine.
"""

from functools import partial
from typing import Any

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_matrix, check_transposable
from kerneltune.kernel_lib.compiled import DEFAULT, EAGER, call
from kerneltune.kernel_lib.functions import run_of, torch_operator
from kerneltune.kernel_lib.groups import GROUP_ALIGNMENT, aligned_size, aligned_starts, bounds, group_ends
from kerneltune.kernel_lib.launch import on_its_device
from kerneltune.ops.fp8 import contract, tensorwise_2d
from kerneltune.ops.fp8.contract import Cast, check_offs, fp8_dtype
from kerneltune.ops.fp8.kernels.gated import gate_and_cast
from kerneltune.ops.fp8.peers import not_torch
from kerneltune.ops.fp8.tensorwise_2d import SegmentConfig, SegmentOutput
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Op, Option, Outputs, Space, Traffic, Variant

OPTIONS: dict[str, tuple[Option, ...]] = {
    "layout": ("both", "row"),
    "groups": ("routed", "balanced", "ragged"),
    "special": (False, True),
}
CALL_OPTIONS: tuple[tuple[str, Option], ...] = (("groups", "routed"), ("special", False))
"""The options, beside the layout, under which a call looks its config up: the host does not know the groups."""

CONTRACT: dict[str, Any] = {
    "axes": ("M", "N", "G"),
    "free_axes": ("M", "G"),
    "dtypes": tuple(DTYPE_NAMES.values()),
    "quants": ("fp8",),
    "options": OPTIONS,
    "free_options": tuple(OPTIONS),
    "unseen_options": ("groups", "special"),
}
"""The fields of `Op` that the gated casts share."""


def space(case: Case) -> Space:
    """Offer tiles of 64 to 256 columns, whose rows divide the alignment of groups."""
    return {
        "rows": (16, 32, 64, 128) if case.option("layout") == "row" else (32, 64, 128),
        "cols": (64, 128, 256),
        "warps": (2, 4, 8),
        "ctas": (0, 2, 4),
        "stages": (1, 2),
    }


def invalid(case: Case, config: SegmentConfig) -> str | None:
    """Say why a config cannot run, or cannot be worth running: a thread loads two elements for each that it casts."""
    if GROUP_ALIGNMENT % config.rows:
        return f"{config.rows} rows do not divide {GROUP_ALIGNMENT}"
    per_thread = config.rows * config.cols // (32 * config.warps)
    if not 16 <= per_thread <= 64:
        return f"{per_thread} elements per thread"
    words = per_thread * ITEMSIZE[case.dtype] / 2
    if 32 * config.warps * config.ctas * (words * 1.25 + 32) > 65536:
        return "more registers than an SM has"
    return tensorwise_2d.invalid(case, config)


def default(case: Case) -> SegmentConfig:
    """Return a config for any shape: 64 elements per thread in a pipeline of two tiles, 16 of fp32."""
    if case.dtype == "float32":
        return SegmentConfig(rows=64, cols=128, warps=16, ctas=0, stages=1)
    if case.option("layout") == "row" or case["M"] * case["N"] <= 1 << 25:
        # smaller tiles without a transpose, or of small matrices: H200, 2026-11-26, 5 cases: 0.91 of the tuned speed -> 1.00
        return SegmentConfig(rows=64, cols=128, warps=4, ctas=4, stages=2)
    return SegmentConfig(rows=128, cols=128, warps=8, ctas=2, stages=2)


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw x (M, 2N), whose rows hold gate, then up, and offs (G,)."""
    x = contract.values((case["M"], 2 * case["N"]), getattr(torch, case.dtype), device, seed, bool(case.option("special")))
    return {"x": x, "offs": group_ends(case, case["G"], device, seed), "layout": case.option("layout")}


def reference(inputs: Inputs) -> Outputs:
    """Gate in fp32, by plain torch; NaN becomes 0, infinity the largest finite value."""
    gate, up = inputs["x"].float().chunk(2, dim=1)
    return {"y": torch.nan_to_num((gate / (1.0 + torch.exp(-gate)) * up).to(inputs["x"].dtype))}


def compare(_case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare values within a rounding of x's type and of fp8, the scale with the largest value's, bytes of q_t with q's."""
    return compare_cast(inputs["offs"], outputs, expected["y"])


def compare_cast(offs: torch.Tensor, outputs: Outputs, y: torch.Tensor, slack: torch.Tensor | float = 0.0) -> list[str]:
    """Compare a cast with its values y (M, N) before it, which the kernel may have rounded otherwise or missed by slack."""
    rows, eps, y = int(offs[-1]), torch.finfo(y.dtype).eps, y.double()
    y, slack = y[:rows], slack[:rows] if isinstance(slack, torch.Tensor) else slack
    amax = y.abs().amax() if y.numel() else y.new_zeros(())
    near = {1.0 / float(contract.multiplier_of(amax * (1.0 + way * eps), "e4m3", pow2=True)) for way in (-2, 0, 2)}
    scale = float(outputs["scale"])
    errors = [] if scale in near else [f"scale: {scale}, expected one of {sorted(near)}"]
    off = (outputs["q"][:rows].double() * scale - y).abs() > (2.0**-4 + 2 * eps) * y.abs() + 2.0**-9 * scale + slack
    errors += [f"q: {int(off.sum())} values differ, the first at {off.nonzero()[0].tolist()}"] if bool(off.any()) else []
    return errors + (_compare_columns(outputs, offs) if "q_t" in outputs else [])


def _compare_columns(outputs: Outputs, offs: torch.Tensor) -> list[str]:
    """Compare the bytes of each aligned group with the bytes of its rows, then zeros up to a multiple of the alignment."""
    q, q_t = outputs["q"].view(torch.uint8), outputs["q_t"].t().view(torch.uint8).t()
    for group, ((start, end), to) in enumerate(zip(bounds(offs), aligned_starts(offs).tolist(), strict=True)):
        stop = to + cdiv(end - start, GROUP_ALIGNMENT) * GROUP_ALIGNMENT
        if not torch.equal(q_t[to : to + end - start], q[start:end]) or bool(q_t[to + end - start : stop].any()):
            return [f"q_t: group {group} differs from the rows of q"]
    return []


def traffic(case: Case) -> Traffic:
    """Count the bytes of x and offs read; of the layouts and the scale written."""
    elements = case["M"] * case["N"]
    aligned = aligned_size(case["M"], case["G"]) * case["N"] if case.option("layout") == "both" else 0
    return Traffic(2 * ITEMSIZE[case.dtype] * elements + 4 * case["G"], elements + aligned + 4)


def check_layout(layout: str) -> None:
    """Check that a gated cast has this layout."""
    if layout not in OPTIONS["layout"]:
        raise ValueError(f"layout must be row or both, got {layout=}")


def check_operands(x: torch.Tensor, offs: torch.Tensor) -> None:
    """Check x (M, 2N) and the group ends of its rows."""
    check_matrix("x", x)
    if x.shape[1] % 2:
        raise ValueError(f"x must be (M, 2N), got {tuple(x.shape)}")
    check_offs(offs, x.shape[0], x.device)


def _results(x: torch.Tensor, offs: torch.Tensor, layout: str) -> SegmentOutput:
    check_layout(layout)
    M, N, dtype = x.shape[0], x.shape[1] // 2, fp8_dtype("e4m3", x.device)
    q_t = x.new_empty((N, aligned_size(M, offs.shape[0])), dtype=dtype).t() if layout == "both" else None
    return SegmentOutput(x.new_empty((M, N), dtype=dtype), q_t, x.new_empty((1,), dtype=torch.float32))


@torch_operator(_results)
@on_its_device
def fp8_swiglu_2d(
    x: torch.Tensor, offs: torch.Tensor, *, layout: str = "both", config: SegmentConfig | None = None
) -> SegmentOutput:
    """Gate token groups by SwiGLU and cast them to e4m3 with one scale, a power of two; NaN becomes 0, infinity is clamped.

    Args:
        x: (M, 2N) bf16, fp16 or fp32; rows hold gate, then up, and may be less than 2^24 elements apart.
        offs: (G,) int32, where groups of rows end, not decreasing, at most M. Rows behind the last group are not written. If
            offs decreases or exceeds M, results are undefined, but nothing outside the tensors is read or written.
        layout: `row`, or `both`: q_t as well.
        config: None takes the best known config.

    Returns:
        q (M, N), contiguous; q_t (aligned_size, N), column-major, or None: aligned groups; the inverse scale
        (1,).
    """
    check_operands(x, offs)
    M, width = x.shape
    check_transposable("x", M)
    found, cast = _results(x, offs, layout), Cast("e4m3", pow2=True, inverse=True)
    if not x.numel():
        found.scale.fill_(cast.scale_of_nothing)
        return found
    if config is None:
        sizes = (("M", M), ("N", width // 2), ("G", offs.shape[0]))
        config = _choose(sizes, DTYPE_NAMES[x.dtype], "fp8", (("layout", layout), *CALL_OPTIONS))
    assert found.q is not None
    gate_and_cast(None, x, offs, found.q, found.q_t, found.scale, cast, config)
    return found


def _gated(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def _gate_then_cast(mode: str, inputs: Inputs, _config: None) -> Outputs:
    """Gate by torch in a mode of `call`, then cast by `fp8_tensorwise_2d`."""
    return cast_groups(call(_gated, mode, (inputs["x"],)), inputs)


def cast_groups(x: torch.Tensor, inputs: Inputs) -> Outputs:
    """Cast x by `fp8_tensorwise_2d` as a gated cast does."""
    found = tensorwise_2d.fp8_tensorwise_2d(x, layout=inputs["layout"], inverse=True, offs=inputs["offs"])
    return {name: tensor for name, tensor in found._asdict().items() if tensor is not None}


OP = Op(
    name="fp8_swiglu_2d",
    inputs=inputs,
    reference=reference,
    compare=compare,
    traffic=traffic,
    variants=(
        Variant("baseline", partial(_gate_then_cast, EAGER)),
        Variant("optimized", run_of(fp8_swiglu_2d), SegmentConfig, space, invalid, default),
        Variant("compile", partial(_gate_then_cast, DEFAULT), unsupported=not_torch, requires=("torch",), compiles=True),
    ),
    module=__name__,
    **CONTRACT,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
