"""Let a normalization write the fp8 operands of the linear layers that read its result: no bf16 result, no cast.

The kernel writes y and its transpose in fp8, for the forward product and for the weight gradient. The scale is known before the
launch: because |x| / sqrt(mean(x²)) is at most sqrt(N), |y| is at most sqrt(N) max |weight|, so no value saturates and no history
is kept.
"""

import math
from typing import Any

import torch
from torch import Tensor

from kerneltune.kernel_lib.functions import custom_op
from kerneltune.kernel_lib.tl_lib import FP8_MAX
from kerneltune.nn.fp8_linear import feed
from kerneltune.nn.recipes import Fp8Operand
from kerneltune.nn.rmsnorm import rmsnorm_bwd
from kerneltune.ops import rmsnorm
from kerneltune.rounding import ALIGNED


def feeding_norm_forward(module: Any, x: Tensor) -> Tensor:
    """Normalize x (…, N) for Fp8Linear layers alone.

    Returns:
        (…, N) of x's type, all NaN, with the operands that the layers read attached.
    """
    eps = getattr(module, "variance_epsilon", None) or module.eps
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] % ALIGNED or not rows.numel():
        shown = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)
        return module.weight * shown  # type: ignore[no-any-return]
    bound = math.sqrt(rows.shape[1]) * module.weight.detach().float().abs().amax().clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(FP8_MAX["e4m3"] / bound))).reshape(1)
    y, q, y_t, scale_inv, _ = rmsnorm_feed(rows, module.weight, scale, eps)
    return feed(y.view(x.shape), Fp8Operand(q, scale_inv, y_t.t(), scale_inv))


@custom_op("kerneltune::rmsnorm_feed")
def rmsnorm_feed(x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalize x (M, N) and cast: NaN (M, N) that takes the gradient, y in fp8, its transpose, 1 / scale, and rsigma (M,)."""
    out = rmsnorm.rmsnorm_fwd(x, weight, eps, quant="fp8_t", scale=scale, amax=torch.zeros_like(scale))
    assert out.y_t is not None and out.scale_inv is not None
    return _nan(x), out.y, out.y_t, out.scale_inv, out.rsigma


@rmsnorm_feed.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, q_t = (x.new_empty(shape, dtype=torch.float8_e4m3fn) for shape in (x.shape, (x.shape[1], x.shape[0])))
    return _nan(x), q, q_t, torch.empty_like(scale), x.new_empty(x.shape[:1], dtype=torch.float32)


def _nan(x: Tensor) -> Tensor:
    return x.new_full((1, 1), math.nan).expand(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, _ = inputs
    ctx.save_for_backward(x, weight, output[4])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return None, None, None, None
    x, weight, rsigma = ctx.saved_tensors
    dx, dweight = rmsnorm_bwd(dy.contiguous(), None, x, rsigma, weight, False, ctx.needs_input_grad[1])
    return dx, dweight if ctx.needs_input_grad[1] else None, None, None


rmsnorm_feed.register_autograd(_backward, setup_context=_save)
