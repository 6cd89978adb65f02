"""Normalize by the root mean square: a function with autograd and a module, also of a sum with a residual.

The kernels run on a GPU and in Triton's interpreter; on any other device the same formula runs in plain torch.
"""

from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerneltune.kernel_lib.arguments import DTYPE_NAMES, check_like
from kerneltune.kernel_lib.functions import custom_op
from kerneltune.kernel_lib.tl_lib import INTERPRETED
from kerneltune.nn.alignment import row_major
from kerneltune.ops import rmsnorm


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, zero_centered: bool = False, residual: None = None
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, zero_centered: bool = False, residual: Tensor
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    zero_centered: bool = False,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute x / sqrt(mean(x²) + eps) · weight over the last axis, in fp32 inside; differentiable once.

    Args:
        x: (…, N), bfloat16, float16 or float32.
        weight: (N,), of x's dtype or float32, on x's device; None multiplies by 1.
        eps: added to the mean of the squares, 0 or more.
        zero_centered: multiply by `weight + 1` instead.
        residual: (…, N) of x's shape, dtype and device, added to x first, in the same launch.

    Returns:
        y (…, N) of x's dtype, contiguous; with a residual y and x + residual, rounded to x's dtype.
    """
    _check(x, weight, eps, zero_centered, residual)
    if not has_kernels(x):
        return _plain(x, weight, eps, zero_centered, residual)
    rows, added = (None if t is None else row_major(t.reshape(-1, t.shape[-1])) for t in (x, residual))
    y, total, _ = rmsnorm_fwd(rows, added, weight, eps, zero_centered)
    return y.reshape(x.shape) if residual is None else (y.reshape(x.shape), total.reshape(x.shape))


class RMSNorm(nn.Module):
    """Apply `rms_norm` over a last axis of `hidden_size`, with a learned weight (hidden_size,) or none.

    Args:
        hidden_size: N, 1 or more.
        eps: as in `rms_norm`.
        elementwise_affine: False for no weight, as in torch.nn.RMSNorm.
        zero_centered: as in `rms_norm`.
        dtype: type of the weight; float32 fits inputs of every dtype.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        elementwise_affine: bool = True,
        zero_centered: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden_size < 1 or not eps >= 0:
            raise ValueError(f"RMSNorm takes a hidden size of 1 or more and eps of 0 or more, got {hidden_size=} {eps=}")
        if zero_centered and not elementwise_affine:
            raise ValueError("RMSNorm takes zero_centered with a weight, got zero_centered=True elementwise_affine=False")
        self.hidden_size, self.eps, self.zero_centered = hidden_size, eps, zero_centered
        self.elementwise_affine = elementwise_affine
        if elementwise_affine:
            self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that the module only normalizes: 1, or 0 for a zero-centered weight."""
        if self.weight is not None:
            nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Map (…, hidden_size) to y of the same shape; with a residual to y of the sum and the sum."""
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered, residual=residual)

    def extra_repr(self) -> str:
        """Return the text that `print(module)` shows."""
        affine = "" if self.elementwise_affine else ", elementwise_affine=False"
        return f"{self.hidden_size}, eps={self.eps:g}, zero_centered={self.zero_centered}{affine}"


@custom_op("kerneltune::rmsnorm_fwd")
def rmsnorm_fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Map x, residual (M, N), weight (N,) to y and x + residual (M, N), contiguous, and rsigma (M,) in fp32 of the sum.

    Without a residual the sum has no elements.
    """
    if residual is None:
        out = rmsnorm.rmsnorm_fwd(x, weight, eps, zero_centered=zero_centered)
        return out.y, x.new_empty(0), out.rsigma
    summed = rmsnorm.rmsnorm_add_fwd(x, residual, weight, eps, zero_centered=zero_centered)
    return summed.y, summed.total, summed.rsigma


@rmsnorm_fwd.register_fake
def _(x: Tensor, residual: Tensor | None, *_others: Any) -> tuple[Tensor, Tensor, Tensor]:
    total = x.new_empty(0 if residual is None else x.shape)
    return x.new_empty(x.shape), total, x.new_empty(x.shape[0], dtype=torch.float32)


@custom_op("kerneltune::rmsnorm_bwd")
def rmsnorm_bwd(
    dz: Tensor, dtotal: Tensor | None, x: Tensor, rsigma: Tensor, weight: Tensor | None, zero_centered: bool, for_weight: bool
) -> tuple[Tensor, Tensor]:
    """Map dz, x (M, N), rsigma (M,), weight (N,) to dx (M, N) and dgamma (N,) of their dtypes, contiguous.

    Args:
        dz, x, rsigma, weight, zero_centered: of the forward.
        dtotal: (M, N), added to dx, or None.
        for_weight: whether dgamma is asked for; else it has no elements.
    """
    dx, dgamma = rmsnorm.rmsnorm_add_bwd(dz, dtotal, x, rsigma, weight, zero_centered=zero_centered, with_dgamma=for_weight)
    return dx, x.new_empty(0) if dgamma is None else dgamma


@rmsnorm_bwd.register_fake
def _(
    dz: Tensor, dtotal: Tensor | None, x: Tensor, rsigma: Tensor, weight: Tensor | None, zero_centered: bool, for_weight: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0) if weight is None or not for_weight else weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, _, ctx.zero_centered = inputs
    _, total, rsigma = output
    ctx.is_sum = residual is not None
    ctx.save_for_backward(total if ctx.is_sum else x, weight, rsigma)
    ctx.mark_non_differentiable(*(() if ctx.is_sum else (total,)), rsigma)
    ctx.set_materialize_grads(False)  # else autograd fills zeros for rsigma


def _backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None, _drsigma: Tensor | None) -> tuple[Tensor | None, ...]:
    dx, dgamma = dtotal, None
    if dy is not None:
        x, weight, rsigma = ctx.saved_tensors
        for_weight = ctx.needs_input_grad[2] and weight is not None
        dx, found = rmsnorm_bwd(dy, dtotal, x, rsigma, weight, ctx.zero_centered, for_weight)
        dgamma = found if for_weight else None
    return dx, dx if ctx.is_sum else None, dgamma, None, None


def has_kernels(x: Tensor) -> bool:
    """Return whether Triton can run on x's device."""
    return x.is_cuda or bool(INTERPRETED)


def _plain(
    x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool, residual: Tensor | None
) -> Tensor | tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    gamma = None if weight is None else weight.float() + int(zero_centered)
    y = F.rms_norm(total.float(), x.shape[-1:], gamma, eps).to(x.dtype).contiguous()
    return y if residual is None else (y, total.contiguous())


rmsnorm_fwd.register_autograd(_backward, setup_context=_save)


def _check(x: Tensor, weight: Tensor | None, eps: float, zero_centered: bool, residual: Tensor | None) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a tensor, got {x!r}")
    if x.ndim == 0 or x.shape[-1] == 0 or x.dtype not in DTYPE_NAMES:
        raise ValueError(f"x must be (…, N) of {', '.join(DTYPE_NAMES.values())}, got {tuple(x.shape)} {x.dtype}")
    if weight is not None:
        is_wide = isinstance(weight, Tensor) and weight.dtype == torch.float32
        check_like("weight", weight, x.shape[-1:], torch.float32 if is_wide else x.dtype, x.device)
    elif zero_centered:
        raise ValueError("zero_centered needs a weight, got weight=None")
    if residual is not None:
        check_like("residual", residual, x.shape, x.dtype, x.device)
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps=}")
