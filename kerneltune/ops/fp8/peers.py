"""Peers of the fp8 casts: torchao, torch.compile and eager torch. torchao is imported when it runs."""

from collections.abc import Callable
from functools import partial

import torch

from kerneltune.kernel_lib.compiled import DEFAULT, EAGER, call, torch_run
from kerneltune.kernel_lib.groups import bounds, group_ends
from kerneltune.ops.fp8.contract import FP8
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Config, Inputs, Outputs, Variant

_Pair = tuple[torch.Tensor, torch.Tensor]
_LARGEST_EAGER = 1 << 32
"""Elements from which peers of several fp32 copies are left out: 2^32 elements are 16 GiB a copy."""


def _scale(amax: torch.Tensor, fp8_format: str, pow2: bool) -> torch.Tensor:
    scale = (torch.finfo(FP8[fp8_format]).max / amax.double().clamp(min=1e-12)).float()
    return torch.exp2(torch.floor(torch.log2(scale))) if pow2 else scale


def _cast(x: torch.Tensor, scale: torch.Tensor, fp8_format: str) -> torch.Tensor:
    limit = torch.finfo(FP8[fp8_format]).max
    return (x.float() * scale).clamp(-limit, limit).to(FP8[fp8_format])


def _along(x: torch.Tensor, fp8_format: str, pow2: bool, inverse: bool, axis: int = 1) -> _Pair:
    """Cast x with a scale per slice along an axis."""
    scale = _scale(x.abs().amax(axis, keepdim=True), fp8_format, pow2)
    return _cast(x, scale, fp8_format), scale.reciprocal() if inverse else scale


def _down(w: torch.Tensor, fp8_format: str, pow2: bool, inverse: bool) -> _Pair:
    """Cast w (E, K, N) with a scale per slice along the last axis, transposed."""
    q, scale = _along(w, fp8_format, pow2, inverse, axis=2)
    return q.contiguous().transpose(1, 2), scale[:, :, 0]


def _grouped(x: torch.Tensor, offs: torch.Tensor, fp8_format: str, pow2: bool, inverse: bool) -> _Pair:
    """Cast with a scale per group of rows and column, without a host sync; column-major."""
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    group = torch.bucketize(rows, offs, right=True)
    amax = x.new_zeros((offs.shape[0], x.shape[1])).scatter_reduce(0, group[:, None].expand_as(x), x.abs(), "amax")
    scale = _scale(amax, fp8_format, pow2)
    q = _cast(x, scale[group], fp8_format).t().contiguous().t()
    return q, (scale.reciprocal() if inverse else scale).flatten()


def _both_of_weights(w: torch.Tensor, fp8_format: str, pow2: bool, inverse: bool) -> tuple[torch.Tensor, ...]:
    return *_along(w, fp8_format, pow2, inverse), *_down(w, fp8_format, pow2, inverse)


def _both_of_groups(x: torch.Tensor, offs: torch.Tensor, fp8_format: str, pow2: bool, inverse: bool) -> tuple[torch.Tensor, ...]:
    return *_along(x, fp8_format, pow2, inverse), *_grouped(x, offs, fp8_format, pow2, inverse)


def _by_torch(function: Callable[..., tuple[torch.Tensor, ...]], tensors: str, results: str) -> Callable[..., Outputs]:
    return torch_run(function, tensors, results, "fp8_format pow2 inverse")


_FIRST, _SECOND = _by_torch(_grouped, "x1 offs", "q1 scale1"), _by_torch(_grouped, "x2 offs", "q2 scale2")
"""The casts of the first and of the second matrix."""


def _dual(mode: str, inputs: Inputs, _config: None) -> Outputs:
    """Cast as `fp8_group_colwise_dual`, first x1, then x2."""
    return {**_FIRST(mode, inputs, None), **_SECOND(mode, inputs, None)}


def _finite(x: torch.Tensor, fp8_format: str, pow2: bool, inverse: bool, layout: str) -> tuple[torch.Tensor, ...]:
    """Cast x (segments, …), made finite, with a scale per segment, in the layouts asked for."""
    x = torch.nan_to_num(x)
    scale = _scale(x.abs().amax((1, 2)), fp8_format, pow2)
    return _in_layouts(_cast(x, scale[:, None, None], fp8_format), scale, inverse, layout)


def _finite_groups(
    x: torch.Tensor, offs: torch.Tensor, fp8_format: str, pow2: bool, inverse: bool, layout: str
) -> tuple[torch.Tensor, ...]:
    """Cast x (M, K), made finite, with a scale per group of rows, without a host sync."""
    x = torch.nan_to_num(x)
    rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    group = torch.bucketize(rows, offs, right=True)
    scale = _scale(x.new_zeros(offs.shape[0]).scatter_reduce(0, group.long(), x.abs().amax(1), "amax"), fp8_format, pow2)
    return _in_layouts(_cast(x, scale[group][:, None], fp8_format), scale, inverse, layout)


def _in_layouts(q: torch.Tensor, scale: torch.Tensor, inverse: bool, layout: str) -> tuple[torch.Tensor, ...]:
    scale = scale.reciprocal() if inverse else scale
    q_t = q if layout == "row" else q.transpose(-2, -1).contiguous().transpose(-2, -1)
    return q, q_t, scale


def _tensorwise(mode: str, inputs: Inputs, _config: None) -> Outputs:
    """Cast as the tensor-wise operators."""
    layout = inputs["layout"]
    options = inputs["fp8_format"], inputs["pow2"], inputs["inverse"], layout
    if "offs" in inputs:
        q, q_t, scale = call(_finite_groups, mode, (inputs["x"], inputs["offs"]), *options)
    else:
        x = inputs["x"][None] if "x" in inputs else inputs["w"].transpose(1, 2)
        q, q_t, scale = call(_finite, mode, (x,), *options)
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
    """Run torchao's cast of weights for dX: fill, scales by atomic min, cast."""
    from torchao.prototype.moe_training.kernels.float8_rowwise import triton_fp8_rowwise_3d_transpose_rhs as cast

    return _torchao(inputs, *cast(inputs["w"], FP8[inputs["fp8_format"]], inputs["pow2"]))


def torchao_group(inputs: Inputs, _config: None) -> Outputs:
    """Run torchao's cast of token groups."""
    from torchao.prototype.moe_training.kernels.jagged_float8_scales import triton_fp8_per_group_colwise_scales as cast

    return _torchao(inputs, *cast(inputs["x"], inputs["offs"], FP8[inputs["fp8_format"]], inputs["pow2"]))


def _both_of(along: Outputs, down: Outputs) -> Outputs:
    return {**along, "q_t": down["q"], "scale_t": down["scale"]}


def torchao_both_of_weights(inputs: Inputs, config: None) -> Outputs:
    """Run torchao's cast of weights for Y, then its cast for dX."""
    return _both_of(torchao_weights(inputs, config), torchao_transpose(inputs, config))


def torchao_both_of_groups(inputs: Inputs, config: None) -> Outputs:
    """Run torchao's cast of activations, then its cast of token groups."""
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
        Variant(name, partial(run, mode), unsupported=not_torch, requires=("torch",), compiles=mode != EAGER)
        for name, mode in (("compile", DEFAULT), ("eager", EAGER))
    )


def _peers(
    torchao: _Run, run: Callable[..., Outputs], unsupported: Callable[[Case], str | None] = not_torchao
) -> tuple[Variant, ...]:
    return (Variant("torchao", torchao, unsupported=unsupported, requires=("torchao",)), *_torch(run))


_BOTH = "q scale q_t scale_t"
ROWS = _peers(torchao_rows, _by_torch(_along, "x", "q scale"))
COLUMNS_OF_WEIGHTS = _peers(torchao_weights, _by_torch(_along, "w", "q scale"))
TRANSPOSED_WEIGHTS = _peers(torchao_transpose, _by_torch(_down, "w", "q scale"))
BOTH_OF_WEIGHTS = _peers(torchao_both_of_weights, _by_torch(_both_of_weights, "w", _BOTH))
GROUPS = _peers(torchao_group, _by_torch(_grouped, "x offs", "q scale"), not_torchao_group)
TWO_OF_GROUPS = _peers(torchao_dual, _dual)
BOTH_OF_GROUPS = _peers(torchao_both_of_groups, _by_torch(_both_of_groups, "x offs", _BOTH), not_torchao_group)
TENSORWISE = _torch(_tensorwise)
"""The peers of each operator: torchao's functions, and torch's in each mode of torch.compile."""
