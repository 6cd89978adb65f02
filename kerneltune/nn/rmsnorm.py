"""RMSNorm for models: a function with autograd and a module.

The kernels run on a GPU and in Triton's interpreter; anywhere else the same formula runs in plain torch.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kerneltune.kernel_lib.tl_lib import INTERPRETED
from kerneltune.ops import rmsnorm

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, zero_centered: bool = False) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in fp32 inside; differentiable once in x and weight.

    Args:
        x: (…, N), bfloat16, float16 or float32.
        weight: (N,), of x's type, on x's device.
        eps: added to the mean of the squares, 0 or more.
        zero_centered: multiply by `weight + 1` instead.

    Returns:
        (…, N) of x's type, contiguous.

    Raises:
        ValueError: a shape, type, device or eps that does not fit.
    """
    _check(x, weight, eps)
    rows = x.reshape(-1, x.shape[-1])
    y: Tensor = rmsnorm_fwd(rows if rows.stride(-1) == 1 else rows.contiguous(), weight, eps, zero_centered)[0]
    return y.reshape(x.shape)


class RMSNorm(nn.Module):
    """`rms_norm` over a last axis of `hidden_size` with a learned weight (hidden_size,).

    Raises:
        ValueError: hidden_size below 1, or a negative eps.
    """

    weight: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        zero_centered: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden_size < 1 or not eps >= 0:
            raise ValueError(f"RMSNorm takes a hidden size of 1 or more and eps of 0 or more, got {hidden_size=} {eps=}")
        self.hidden_size, self.eps, self.zero_centered = hidden_size, eps, zero_centered
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that the module only normalises: 1, or 0 where it is zero-centred."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered else 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """(…, hidden_size) to the same."""
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)

    def extra_repr(self) -> str:
        """What `print(module)` shows."""
        return f"{self.hidden_size}, eps={self.eps:g}, zero_centered={self.zero_centered}"


@torch.library.custom_op("kerneltune::rmsnorm_fwd", mutates_args=())
def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """x (M, N), weight (N,) to y (M, N) of x's type, contiguous, and rsigma (M,) in fp32."""
    if not _has_kernels(x):
        return _plain_fwd(x, weight, eps, zero_centered)
    out = rmsnorm.rmsnorm_fwd(x, weight, eps, zero_centered=zero_centered)
    return out.y, out.rsigma


@torch.library.custom_op("kerneltune::rmsnorm_bwd", mutates_args=())
def rmsnorm_bwd(dz: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """dz, x (M, N), rsigma (M,), weight (N,) to dx (M, N) of x's type, contiguous, and dgamma (N,) of the weight's."""
    if not _has_kernels(x):
        return _plain_bwd(dz, x, rsigma, weight, zero_centered)
    dx, dgamma = rmsnorm.rmsnorm_bwd(dz, x, rsigma, weight, zero_centered=zero_centered)
    return dx, dgamma


@rmsnorm_fwd.register_fake
def _(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:1], dtype=torch.float32)


@rmsnorm_bwd.register_fake
def _(dz: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, zero_centered: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float, bool], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, ctx.zero_centered = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # else autograd fills zeros for rsigma


def _backward(ctx: Any, dy: Tensor | None, _drsigma: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
    if dy is None:
        return None, None, None, None
    x, weight, rsigma = ctx.saved_tensors
    dx, dgamma = rmsnorm_bwd(dy, x, rsigma, weight, ctx.zero_centered)
    return dx, dgamma, None, None


rmsnorm_fwd.register_autograd(_backward, setup_context=_save)


def _has_kernels(x: Tensor) -> bool:
    """Whether Triton can run on x's device."""
    return x.is_cuda or bool(INTERPRETED)


def _plain_fwd(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    x32 = x.float()
    rsigma = torch.rsqrt(x32.square().mean(dim=1) + eps)
    y = x32 * rsigma[:, None] * _gamma(weight, zero_centered)
    return y.to(x.dtype).contiguous(), rsigma


def _plain_bwd(dz: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, zero_centered: bool) -> tuple[Tensor, Tensor]:
    x32, dz32, r = x.float(), dz.float(), rsigma[:, None]
    dzg = dz32 * _gamma(weight, zero_centered)
    correction = r.square() * (dzg * x32).mean(dim=1, keepdim=True)
    return (r * (dzg - correction * x32)).to(x.dtype).contiguous(), (dz32 * x32 * r).sum(0).to(weight.dtype)


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1.0 if zero_centered else weight.float()


def _check(x: Tensor, weight: Tensor, eps: float) -> None:
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor):
        raise ValueError(f"rms_norm takes tensors, got {x=} {weight=}")
    if x.ndim == 0 or x.shape[-1] == 0 or tuple(weight.shape) != (x.shape[-1],):
        raise ValueError(f"rms_norm takes x (…, N) and weight (N,), got {tuple(x.shape)=} {tuple(weight.shape)=}")
    if x.dtype not in _DTYPES or weight.dtype != x.dtype:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ValueError(f"rms_norm takes x and weight of one type, {known}, got {x.dtype=} {weight.dtype=}")
    if x.device != weight.device:
        raise ValueError(f"rms_norm takes x and weight on one device, got {x.device=} {weight.device=}")
    if not eps >= 0:
        raise ValueError(f"rms_norm takes eps of 0 or more, got {eps=}")
