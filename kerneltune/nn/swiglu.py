"""Gate the rows of experts by SwiGLU: torch's functions forward, which torch.compile fuses, and one kernel backward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kerneltune.compat import has_hooks
from kerneltune.nn.alignment import row_major
from kerneltune.ops import swiglu as _operators  # noqa: F401  registers torch.ops.kerneltune.swiglu_bwd

_SILU = "SiLU", "SiLUActivation"


def is_plain_silu(activation: nn.Module) -> bool:
    """Return whether an activation is SiLU without hooks."""
    return type(activation).__name__ in _SILU and not has_hooks(activation)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(gate) * up (M, N) of x (M, 2N), whose rows hold gate, then up; differentiable once, in fp32 rounded once."""
    y: Tensor = _Swiglu.apply(x)  # type: ignore[no-untyped-call]
    return y


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx: Tensor = torch.ops.kerneltune.swiglu_bwd(row_major(grads[0]), x)
        return dx
