"""Peers of the fp8 casts: torchao, torch.compile and eager torch. torchao is imported when it runs."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kerneltune.kernel_lib.compiled import call_compiled
from kerneltune.kernel_lib.groups import bounds, group_ends
from kerneltune.ops.fp8.contract import FP8
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Config, Inputs, Outputs, Variant

_Pair = tuple[torch.Tensor, torch.Tensor]
_LARGEST_EAGER = 1 << 32


def _scale(amax: torch.Tensor, dtype: torch.dtype, pow2: bool) -> torch.Tensor:
    scale = (torch.finfo(dtype).max / amax.double().clamp(min=1e-12)).float()
    return torch.exp2(torch.floor(torch.log2(scale))) if pow2 else scale


def _cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-limit, limit).to(dtype)


def _slices(x: torch.Tensor, axis: int, dtype: torch.dtype, pow2: bool, inverse: bool, transpose: bool) -> _Pair:
    """Cast x with a scale per slice along an axis; transpose: in the other order of the last two axes."""
    scale = _scale(x.abs().amax(axis, keepdim=True), dtype, pow2)
    q = _cast(x, scale, dtype)
    if transpose:
        q = q.contiguous()
    return q, scale.reciprocal() if inverse else scale


def _grouped(x: torch.Tensor, offs: torch.Tensor, dtype: torch.dtype, pow2: bool, inverse: bool) -> _Pair:
    """Cast with a scale per group of rows and column, without a host sync; column-major."""
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    group = torch.bucketize(rows, offs, right=True)
    amax = x.new_zeros((offs.shape[0], x.shape[1])).scatter_reduce(0, group[:, None].expand_as(x), x.abs(), "amax")
    scale = _scale(amax, dtype, pow2)
    q = _cast(x, scale[group], dtype).t().contiguous().t()
    return q, (scale.reciprocal() if inverse else scale).flatten()


def _called(function: Callable[..., Any], compiled: bool, tensors: tuple[torch.Tensor, ...], *options: Any) -> Any:
    return call_compiled(function, tensors, *options) if compiled else function(*tensors, *options)


def _chosen(inputs: Inputs) -> tuple[torch.dtype, bool, bool]:
    return FP8[inputs["fp8_format"]], inputs["pow2"], inputs["inverse"]


def rows(compiled: bool, inputs: Inputs, _config: None) -> Outputs:
    """Cast as `fp8_rowwise_2d`, one torch operator after another or by torch.compile with its defaults."""
    q, scale = _called(_slices, compiled, (inputs["x"],), 1, *_chosen(inputs), False)
    return {"q": q, "scale": scale}


def weights(compiled: bool, inputs: Inputs, _config: None) -> Outputs:
    """Cast as `fp8_colwise_3d`."""
    q, scale = _called(_slices, compiled, (inputs["w"],), 1, *_chosen(inputs), False)
    return {"q": q, "scale": scale}


def transposed_weights(compiled: bool, inputs: Inputs, _config: None) -> Outputs:
    """Cast as `fp8_rowwise_3d_transpose`."""
    q, scale = _called(_slices, compiled, (inputs["w"],), 2, *_chosen(inputs), True)
    return {"q": q.transpose(1, 2), "scale": scale[:, :, 0]}


def group(compiled: bool, inputs: Inputs, _config: None) -> Outputs:
    """Cast as `fp8_group_colwise`."""
    q, scale = _called(_grouped, compiled, (inputs["x"], inputs["offs"]), *_chosen(inputs))
    return {"q": q, "scale": scale}


def _along_and_down(w: torch.Tensor, dtype: torch.dtype, pow2: bool, inverse: bool) -> tuple[torch.Tensor, ...]:
    return *_slices(w, 1, dtype, pow2, inverse, False), *_slices(w, 2, dtype, pow2, inverse, True)


def both_of_weights(compiled: bool, inputs: Inputs, _config: None) -> Outputs:
    """Cast as `fp8_rowwise_3d_both`."""
    q, scale, q_t, scale_t = _called(_along_and_down, compiled, (inputs["w"],), *_chosen(inputs))
    return {"q": q, "scale": scale, "q_t": q_t.transpose(1, 2), "scale_t": scale_t[:, :, 0]}


def _along_and_down_groups(
    x: torch.Tensor, offs: torch.Tensor, dtype: torch.dtype, pow2: bool, inverse: bool
) -> tuple[torch.Tensor, ...]:
    return *_slices(x, 1, dtype, pow2, inverse, False), *_grouped(x, offs, dtype, pow2, inverse)


def both_of_groups(compiled: bool, inputs: Inputs, _config: None) -> Outputs:
    """Cast as `fp8_group_both`."""
    q, scale, q_t, scale_t = _called(_along_and_down_groups, compiled, (inputs["x"], inputs["offs"]), *_chosen(inputs))
    return {"q": q, "scale": scale, "q_t": q_t, "scale_t": scale_t}


def dual(compiled: bool, inputs: Inputs, _config: None) -> Outputs:
    """Cast as `fp8_group_colwise_dual`, one matrix after the other."""
    outputs = {}
    for i in (1, 2):
        x = inputs[f"x{i}"]
        outputs[f"q{i}"], outputs[f"scale{i}"] = _called(_grouped, compiled, (x, inputs["offs"]), *_chosen(inputs))
    return outputs


def _finite(x: torch.Tensor, dtype: torch.dtype, pow2: bool, inverse: bool, layout: str) -> tuple[torch.Tensor, ...]:
    """Cast x (segments, …), made finite, with a scale per segment, in the layouts asked for."""
    x = torch.nan_to_num(x)
    scale = _scale(x.abs().amax((1, 2)), dtype, pow2)
    return _in_layouts(_cast(x, scale[:, None, None], dtype), scale, inverse, layout)


def _finite_groups(
    x: torch.Tensor, offs: torch.Tensor, dtype: torch.dtype, pow2: bool, inverse: bool, layout: str
) -> tuple[torch.Tensor, ...]:
    """Cast x (M, K), made finite, with a scale per group of rows, without a host sync."""
    x = torch.nan_to_num(x)
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    group = torch.bucketize(rows, offs, right=True)
    scale = _scale(x.new_zeros(offs.shape[0]).scatter_reduce(0, group.long(), x.abs().amax(1), "amax"), dtype, pow2)
    return _in_layouts(_cast(x, scale[group][:, None], dtype), scale, inverse, layout)


def _in_layouts(q: torch.Tensor, scale: torch.Tensor, inverse: bool, layout: str) -> tuple[torch.Tensor, ...]:
    scale = scale.reciprocal() if inverse else scale
    q_t = q if layout == "row" else q.transpose(-2, -1).contiguous().transpose(-2, -1)
    return q, q_t, scale


def tensorwise(compiled: bool, inputs: Inputs, _config: None) -> Outputs:
    """Cast as the tensor-wise operators."""
    layout = inputs["layout"]
    if "offs" in inputs:
        q, q_t, scale = _called(_finite_groups, compiled, (inputs["x"], inputs["offs"]), *_chosen(inputs), layout)
    else:
        x = inputs["x"][None] if "x" in inputs else inputs["w"].transpose(1, 2)
        q, q_t, scale = _called(_finite, compiled, (x,), *_chosen(inputs), layout)
        q, q_t = (q[0], q_t[0]) if "x" in inputs else (q.transpose(1, 2), q_t)
    outputs = {"q": q} if layout != "col" else {}
    return outputs | ({"q_t": q_t} if layout != "row" else {}) | {"scale": scale}


def _torchao(inputs: Inputs, q: torch.Tensor, scale: torch.Tensor) -> Outputs:
    return {"q": q, "scale": scale.reciprocal() if inputs["inverse"] else scale}


def torchao_rows(inputs: Inputs, _config: None) -> Outputs:
    """Run torchao's cast of activations."""
    from torchao.prototype.moe_training.kernels.float8_rowwise import triton_fp8_rowwise_2d_scale_and_cast as cast

    return _torchao(inputs, *cast(inputs["x"], FP8[inputs["fp8_format"]], inputs["pow2"]))


def torchao_weights(inputs: Inputs, _config: None) -> Outputs:
    """Run torchao's cast of weights for the forward product."""
    from torchao.prototype.moe_training.kernels.float8_rowwise import triton_fp8_colwise_3d_scale_and_cast as cast

    return _torchao(inputs, *cast(inputs["w"], FP8[inputs["fp8_format"]], inputs["pow2"]))


def torchao_transpose(inputs: Inputs, _config: None) -> Outputs:
    """Run torchao's cast of weights for dgrad: fill, scales by atomic min, cast."""
    from torchao.prototype.moe_training.kernels.float8_rowwise import triton_fp8_rowwise_3d_transpose_rhs as cast

    return _torchao(inputs, *cast(inputs["w"], FP8[inputs["fp8_format"]], inputs["pow2"]))


def torchao_group(inputs: Inputs, _config: None) -> Outputs:
    """Run torchao's cast of token groups."""
    from torchao.prototype.moe_training.kernels.jagged_float8_scales import triton_fp8_per_group_colwise_scales as cast

    return _torchao(inputs, *cast(inputs["x"], inputs["offs"], FP8[inputs["fp8_format"]], inputs["pow2"]))


def _both_of(along: Outputs, down: Outputs) -> Outputs:
    return {**along, "q_t": down["q"], "scale_t": down["scale"]}


def torchao_both_of_weights(inputs: Inputs, config: None) -> Outputs:
    """Run torchao's casts of weights for the forward product and for dgrad, one after the other."""
    return _both_of(torchao_weights(inputs, config), torchao_transpose(inputs, config))


def torchao_both_of_groups(inputs: Inputs, config: None) -> Outputs:
    """Run torchao's casts of activations and of token groups, one after the other."""
    return _both_of(torchao_rows(inputs, config), torchao_group(inputs, config))


def torchao_dual(inputs: Inputs, _config: None) -> Outputs:
    """Run torchao's cast of two matrices with the same token groups, as its training path does."""
    from torchao.prototype.moe_training.kernels.jagged_float8_scales import triton_fp8_per_group_colwise_scales_dual as cast

    x1, x2, dtype = inputs["x1"], inputs["x2"], FP8[inputs["fp8_format"]]
    q1, scale1, q2, scale2 = cast(x1, x2, inputs["offs"], dtype, inputs["pow2"])
    first, second = _torchao(inputs, q1, scale1), _torchao(inputs, q2, scale2)
    return {"q1": first["q"], "scale1": first["scale"], "q2": second["q"], "scale2": second["scale"]}


def not_torch(case: Case) -> str | None:
    """Say why plain torch does not support a case."""
    if any(size == 0 for _, size in case.axes):
        return "no elements"
    elements = 1
    for axis, size in case.axes:
        elements *= 1 if axis in ("G", "N2") else size
    return "its fp32 copies do not fit in memory" if elements > _LARGEST_EAGER else None


def not_torchao(case: Case) -> str | None:
    """Say why torchao's kernels do not support a case."""
    if case.dtype == "float16":
        return "takes bfloat16 and float32"
    if case.option("special"):
        return "leaves NaN and infinity undefined"
    return "no elements" if any(size == 0 for _, size in case.axes) else None


def not_torchao_group(case: Case) -> str | None:
    """Say why torchao's cast of token groups is wrong: rows above the mean are lost, scales overwritten."""
    axis = "N" if "N" in dict(case.axes) else "K"
    if case[axis] % 128:
        return f"wrong: scales of the last columns overwrite the next group's where {axis} % 128 != 0"
    mean = cdiv(case["M"], case["G"])
    held = max(256, next_power_of_2(mean))
    if case["M"] and held <= 2048:
        largest = max(end - start for start, end in bounds(group_ends(case, case["G"], "cpu", 0)))
        if largest > held:
            return f"wrong: loses the rows of a group beyond {held}"
    return not_torchao(case)


_Run = Callable[[Inputs, Config], Outputs]


def _torch(run: Callable[..., Outputs]) -> tuple[Variant, ...]:
    return tuple(
        Variant(name, partial(run, compiled), unsupported=not_torch, requires=("torch",), compiles=compiled)
        for name, compiled in (("compile", True), ("eager", False))
    )


def _peers(
    torchao: _Run, run: Callable[..., Outputs], unsupported: Callable[[Case], str | None] = not_torchao
) -> tuple[Variant, ...]:
    return (Variant("torchao", torchao, unsupported=unsupported, requires=("torchao",)), *_torch(run))


ROWS = _peers(torchao_rows, rows)
COLUMNS_OF_WEIGHTS = _peers(torchao_weights, weights)
TRANSPOSED_WEIGHTS = _peers(torchao_transpose, transposed_weights)
BOTH_OF_WEIGHTS = _peers(torchao_both_of_weights, both_of_weights)
GROUPS = _peers(torchao_group, group, not_torchao_group)
TWO_OF_GROUPS = _peers(torchao_dual, dual)
BOTH_OF_GROUPS = _peers(torchao_both_of_groups, both_of_groups, not_torchao_group)
TENSORWISE = _torch(tensorwise)
