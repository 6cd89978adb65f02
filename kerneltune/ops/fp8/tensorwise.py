"""Quantisation with one scale per tensor, expert or token group, of values made finite first.

    x' = 0 for NaN, ± the largest finite number of x's type for ± infinity      q = fp8(x' * s), s from max |x'|

Two launches, no host sync. Where scales are powers of two they read x once, and again what was cast too early
(early_kernels.py: how much depends on where the largest numbers lie, at worst all); else twice (tensorwise_kernels.py).
May import cache, spec, tl_lib, launch, workspace.
"""

from typing import Any, NamedTuple

import torch

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_apart, check_like, check_matrix, check_turned, in_pairs
from kerneltune.kernel_lib.groups import bounds, group_ends
from kerneltune.kernel_lib.launch import on_its_device, registers, resident, too_small_to_turn
from kerneltune.kernel_lib.tl_lib import TL_DTYPES, TL_FP8
from kerneltune.kernel_lib.workspace import workspace
from kerneltune.ops.fp8 import early_kernels, reference, tensorwise_kernels
from kerneltune.ops.fp8.common import FREE_GROUP_OPTIONS, FREE_OPTIONS, QUANT_OPTIONS, Cast, check_offs, check_weights, target
from kerneltune.ops.fp8.segments import SegmentConfig, at_most, default, space, valid
from kerneltune.rounding import cdiv
from kerneltune.spec import Case, Inputs, Option, Outputs, Traffic

LAYOUTS = ("row", "col", "both")
_AGAIN = 4
"""Programs per multiprocessor that cast again, after a launch with a program per tile."""

_LANES = 128
"""Tiles that such a program looks at together."""


class SegmentOutput(NamedTuple):
    """q in the layout of the input and q_t transposed, None where the layout leaves it out; scales (segments,) fp32."""

    q: torch.Tensor | None
    q_t: torch.Tensor | None
    scale: torch.Tensor


@on_its_device
def fp8_tensorwise_2d(
    x: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    layout: str = "row",
    pow2: bool = True,
    inverse: bool = False,
    config: SegmentConfig | None = None,
) -> SegmentOutput:
    """A matrix in fp8 with one scale; NaN becomes 0, infinity the largest finite number of x's type.

    Args:
        x: (M, K) bf16, fp16 or fp32; rows may be less than 2^24 numbers apart, elements of a row must be adjacent.
        fp8_format: `e4m3`, `e5m2`, `e4m3fnuz` or `e5m2fnuz`.
        layout: `row`, `col` or `both`, from one pass.
        pow2: round scales down to powers of two.
        inverse: return 1 / scale, which scaled matrix products want, instead of the multiplier.
        config: None takes the best known config.

    Returns:
        q (M, K) fp8, contiguous, or None; q_t (M, K), strides (1, M), or None; scale (1,) fp32.

    Raises:
        ValueError: a wrong shape, stride, dtype or value, which it names.

    Source: torchao pull request 4179's fp8_tensorwise_quantize_2d, 4389's dual layout.
    """
    check_matrix("x", x)
    cast = checked(fp8_format, pow2, inverse, layout, x.device)
    if config is None and x.numel():
        config = _choose_2d((("M", x.shape[0]), ("K", x.shape[1])), DTYPE_NAMES[x.dtype], "fp8", _options(layout))
    return _of_matrix(x, None, layout, cast, config)


@on_its_device
def fp8_tensorwise_3d(
    w: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    layout: str = "row",
    pow2: bool = True,
    inverse: bool = False,
    amax: torch.Tensor | None = None,
    out: SegmentOutput | None = None,
    config: SegmentConfig | None = None,
) -> SegmentOutput:
    """Expert weights in fp8 with one scale per expert, for the forward product, for dgrad, or for both.

    Args:
        w: (E, K, N) bf16, fp16 or fp32, column-major: strides (K N, 1, K), the transposed view of a contiguous (E, N, K).
        layout: `row`, as w lies in memory; `col`, transposed; `both`.
        fp8_format, pow2, inverse, config: as in `fp8_tensorwise_2d`.
        amax: (E,) fp32, the largest magnitudes expected, 0 where nothing is known; those found take their place. The results do
            not depend on it: where a scale comes out as expected, nothing of the expert is cast twice. Left alone without pow2.
        out: tensors like those returned, to be written in their place.

    Returns:
        q (E, K, N) fp8, strides of w, or None; q_t (E, N, K), strides (N K, 1, N), or None; scale (E,) fp32.

    Raises:
        ValueError: a wrong shape, stride, dtype or value, which it names.

    Source: torchao pull request 4179's fp8_tensorwise_quantize_3d.
    """
    check_weights("w", w)
    cast = checked(fp8_format, pow2, inverse, layout, w.device)
    E, K, N = w.shape
    given_q, given_q_t, given_scale = out or (None, None, None)
    q = target("out.q", given_q, (E, N, K), cast.dtype, w.device, turned=True) if layout != "col" else None
    q_t = target("out.q_t", given_q_t, (E, K, N), cast.dtype, w.device, turned=True) if layout != "row" else None
    scale = target("out.scale", given_scale, (E,), torch.float32, w.device)
    if amax is not None:
        check_like("amax", amax, (E,), torch.float32, w.device)
    if config is None and w.numel():
        config = _choose_3d((("E", E), ("K", K), ("N", N)), DTYPE_NAMES[w.dtype], "fp8", _options(layout))
    _launch(w.transpose(1, 2).reshape(E * N, K), None, q, q_t, scale, cast, config, amax)
    return SegmentOutput(None if q is None else q.transpose(1, 2), None if q_t is None else q_t.transpose(1, 2), scale)


@on_its_device
def fp8_tensorwise_group(
    x: torch.Tensor,
    offs: torch.Tensor,
    fp8_format: str = "e4m3",
    *,
    layout: str = "row",
    pow2: bool = True,
    inverse: bool = False,
    config: SegmentConfig | None = None,
) -> SegmentOutput:
    """Token groups in fp8 with one scale per group.

    Args:
        x: (M, K) as in `fp8_tensorwise_2d`.
        offs: (G,) int32, where each group's rows end, not decreasing; the last is M. Groups may be empty and of any size.
            Nobody waits for the GPU to check it (under TRITON_DEBUG=1 the device asserts it): where they decrease or exceed M,
            bytes elsewhere are written, and this launch or a later one may wait for ever.
        fp8_format, layout, pow2, inverse, config: as in `fp8_tensorwise_2d`.

    Returns:
        q and q_t as from `fp8_tensorwise_2d`; scale (G,) fp32.

    Raises:
        ValueError: a wrong shape, stride, dtype, device or value, which it names.

    Source: torchao pull request 4179's fp8_tensorwise_per_group_quantize.
    """
    check_matrix("x", x)
    cast = checked(fp8_format, pow2, inverse, layout, x.device)
    check_offs(offs, x.shape[0], x.device)
    if config is None and x.numel():
        axes, options = (("M", x.shape[0]), ("K", x.shape[1]), ("G", offs.shape[0])), (*_options(layout), ("groups", "balanced"))
        config = _choose_group(axes, DTYPE_NAMES[x.dtype], "fp8", options)
    return _of_matrix(x, offs, layout, cast, config)


def _of_matrix(
    x: torch.Tensor, offs: torch.Tensor | None, layout: str, cast: Cast, config: SegmentConfig | None
) -> SegmentOutput:
    """x as a whole, or in the groups of `offs`, into new tensors."""
    M, K = x.shape
    if layout != "row":
        check_turned("x", M)
    q = x.new_empty((M, K), dtype=cast.dtype) if layout != "col" else None
    q_t = x.new_empty((K, M), dtype=cast.dtype) if layout != "row" else None
    scale = x.new_empty((1 if offs is None else offs.shape[0],), dtype=torch.float32)
    _launch(x, offs, q, q_t, scale, cast, config)
    return SegmentOutput(q, None if q_t is None else q_t.t(), scale)


def _launch(x, offs, q, q_t, scale, cast: Cast, config: SegmentConfig | None, amax: torch.Tensor | None = None) -> None:
    """The rows of x in as many equal segments as there are scales, or in the groups of `offs`; config: None to cast nothing."""
    if config is None or not x.numel():
        scale.fill_(cast.scale_of_nothing)
        return
    c, segments = config, scale.shape[0]
    if q_t is not None and (reason := too_small_to_turn(c.rows, c.cols, c.warps)):
        raise ValueError(f"{config=}: {reason}")
    rows = x.shape[0] // segments if offs is None else x.shape[0]
    # 16-bit numbers in pairs, where widths and addresses allow
    pairs = 2 if in_pairs(x) else 1
    dtype = TL_DTYPES[x.dtype]
    check_apart("x", x, c.rows, pairs)
    if pairs == 2:
        x, q = x.view(torch.int32), None if q is None else q.view(torch.int16)
    cols = c.cols // pairs
    blocks = segments * cdiv(rows, c.rows) if offs is None else rows // c.rows + segments
    total = blocks * cdiv(x.shape[1], cols)
    programs = min(total, resident(x.device, c.ctas)) if c.ctas else total
    offs_or_any = x if offs is None else offs
    tile = {
        "C": x.shape[1], "stride": x.stride(0), "JAGGED": offs is not None,
        "GROUPS_LOG2": max(0, (segments - 1).bit_length()), "ROWS": c.rows, "COLS": cols, "PAIRS": pairs, "dtype": dtype,
        "EVEN_ROWS": offs is None and rows % c.rows == 0, "num_warps": c.warps,
    }  # fmt: skip
    if c.ctas:
        tile |= registers(c.warps, c.ctas)
    out = {"ROWMAJOR": q is not None, "COLMAJOR": q_t is not None, "fp8": TL_FP8[cast.fp8_format], "PACKED": rows % 4 == 0}
    size = (rows, segments, total)
    q_or_any, q_t_or_any = x if q is None else q, x if q_t is None else q_t.view(torch.uint8)
    if cast.pow2:
        if not c.ctas and offs is None and x.itemsize == 4:
            tile |= registers(c.warps, at_most(c, 4 // pairs))
        constants = {"FP8_MAX": cast.constants["FP8_MAX"], **out, **tile}
        few = min(total, resident(x.device, c.ctas or _AGAIN))
        casts = (x, q_or_any, q_t_or_any)
        with workspace(segments + total, x.device) as ws:
            early_kernels.cast_early[(programs,)](*casts, offs_or_any, amax, ws, *size, STAGES=c.stages, **constants)
            early_kernels.cast_again[(few,)](
                *casts, scale, offs_or_any, amax, ws, *size, INVERSE=cast.inverse, LANES=_LANES, **constants
            )
        return
    tile |= {"STAGES": c.stages}
    with workspace(segments, x.device) as ws:
        tensorwise_kernels._amax_segments[(programs,)](x, offs_or_any, ws, *size, **tile)
        tensorwise_kernels._cast_segments[(programs,)](
            x, q_or_any, q_t_or_any, scale, offs_or_any, ws, *size,
            FP8_MAX=cast.constants["FP8_MAX"], INVERSE=cast.inverse, **out, **tile,
        )  # fmt: skip


def checked(fp8_format: str, pow2: bool, inverse: bool, layout: str, where: torch.device) -> Cast:
    """How to cast.

    Raises:
        ValueError: there is no such format, on the device, or no such layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout=}")
    return Cast(fp8_format, pow2, inverse, where)


def _options(layout: str) -> tuple[tuple[str, Option], ...]:
    return (*QUANT_OPTIONS, ("layout", layout))


_choose_2d = cache.Chooser("fp8_tensorwise_2d", SegmentConfig, valid, default, ("M",), free_options=FREE_OPTIONS, space=space)
_choose_3d = cache.Chooser("fp8_tensorwise_3d", SegmentConfig, valid, default, ("E",), free_options=FREE_OPTIONS, space=space)
_choose_group = cache.Chooser(
    "fp8_tensorwise_group", SegmentConfig, valid, default, ("M", "G"), free_options=FREE_GROUP_OPTIONS, space=space
)


def sanitised(inputs: Inputs, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the reference gives for one segment (rows, cols) under the inputs' options: q, and scale (1,)."""
    flat = torch.nan_to_num(x).reshape(1, -1)
    q, scale = reference.quantised(flat, 1, inputs)
    return {"q": q.view(x.shape), "scale": scale.view(1)}


def matrix_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """x (M, K) and layout."""
    x = reference.values((case["M"], case["K"]), getattr(torch, case.dtype), device, seed, bool(case.option("special")))
    return {"x": x, "layout": case.option("layout")} | reference.options(case)


def group_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """x (M, K), offs (G,) and layout."""
    return {**matrix_inputs(case, device=device, seed=seed), "offs": group_ends(case, case["G"], device, seed)}


def weight_inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """w (E, K, N), column-major, and layout."""
    E, K, N, dtype = case["E"], case["K"], case["N"], getattr(torch, case.dtype)
    w = reference.values((E, N, K), dtype, device, seed, bool(case.option("special")))
    return {"w": w.transpose(1, 2), "layout": case.option("layout")} | reference.options(case)


def matrix_reference(inputs: Inputs) -> Outputs:
    """One segment."""
    return _laid_out(inputs, *sanitised(inputs, inputs["x"]).values())


def group_reference(inputs: Inputs) -> Outputs:
    """Group by group."""
    parts = [sanitised(inputs, inputs["x"][start:end]) for start, end in bounds(inputs["offs"])]
    q = torch.cat([part["q"].view(torch.uint8) for part in parts]).view(parts[0]["q"].dtype)
    return _laid_out(inputs, q, torch.cat([part["scale"] for part in parts]))


def weight_reference(inputs: Inputs) -> Outputs:
    """Expert by expert."""
    w = inputs["w"].transpose(1, 2)
    q = torch.empty(w.shape, dtype=reference.FP8[inputs["fp8_format"]], device=w.device)
    scale = torch.empty(w.shape[0], dtype=torch.float32, device=w.device)
    for expert in range(w.shape[0]):
        part = sanitised(inputs, w[expert])
        q[expert], scale[expert] = part["q"], part["scale"][0]
    outputs = _laid_out(inputs, q, scale)
    return {name: t.transpose(1, 2) if name == "q" else t for name, t in outputs.items()}


def _laid_out(inputs: Inputs, q: torch.Tensor, scale: torch.Tensor) -> Outputs:
    """The outputs that the inputs' layout asks for. A 2D q_t has the shape of q, a 3D one that of its transpose."""
    layout = inputs["layout"]
    outputs = {"q": q} if layout != "col" else {}
    if layout != "row":
        outputs["q_t"] = q
    return outputs | {"scale": scale}


def traffic(case: Case) -> Traffic:
    """The tensor and group ends read once; what the layout asks for, and the scales, written."""
    axes = dict(case.axes)
    groups, experts = axes.get("G", 0), axes.get("E", 1)
    elements = axes["M"] * axes["K"] if "M" in axes else experts * axes["K"] * axes["N"]
    copies = 2 if case.option("layout") == "both" else 1
    return Traffic(ITEMSIZE[case.dtype] * elements + 4 * groups, copies * elements + 4 * (groups or experts))


def _outputs(out: SegmentOutput) -> Outputs:
    return {name: t for name, t in out._asdict().items() if t is not None}


def chosen(inputs: Inputs) -> dict[str, Any]:
    """The options out of inputs, as keyword arguments."""
    return {**reference.chosen(inputs), "layout": inputs["layout"]}


def run_matrix(inputs: Inputs, config: SegmentConfig | None) -> Outputs:
    """`fp8_tensorwise_2d` on a case's inputs."""
    return _outputs(fp8_tensorwise_2d(inputs["x"], config=config, **chosen(inputs)))


def run_weights(inputs: Inputs, config: SegmentConfig | None) -> Outputs:
    """`fp8_tensorwise_3d` on a case's inputs."""
    return _outputs(fp8_tensorwise_3d(inputs["w"], config=config, **chosen(inputs)))


def run_group(inputs: Inputs, config: SegmentConfig | None) -> Outputs:
    """`fp8_tensorwise_group` on a case's inputs."""
    return _outputs(fp8_tensorwise_group(inputs["x"], inputs["offs"], config=config, **chosen(inputs)))
