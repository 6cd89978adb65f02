"""A grouped product and its gradients, in fp8 and in fp64, for the tests of both."""

import torch

from kerneltune.nn import fp8_grouped_mm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = ["tensorwise", "rowwise"]


def sqnr_db(got: torch.Tensor, want: torch.Tensor) -> float:
    """Signal to quantisation noise."""
    want = want.double()
    return float(20 * torch.log10(want.norm() / (got.double() - want).norm()))


def leaves(M: int, K: int, N: int, E: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """Make A (M, K) and the parameter W (E, N, K), of normal values."""
    a = torch.randn(M, K, device=DEVICE).to(dtype).requires_grad_()
    return a, torch.randn(E, N, K, device=DEVICE).to(dtype).requires_grad_()


def offsets(ends: list[int]) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


def expected(a: torch.Tensor, w: torch.Tensor, ends: list[int], dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return Y, dA and dW in fp64, by autograd."""
    a64, w64 = (t.detach().double().requires_grad_() for t in (a, w))
    y = torch.cat([a64[start:end] @ w64[e].t() for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False))])
    return y.detach(), *torch.autograd.grad(y, (a64, w64), dy.double())


def products(a: torch.Tensor, w: torch.Tensor, offs: torch.Tensor, dy: torch.Tensor, **options) -> tuple[torch.Tensor, ...]:
    y = fp8_grouped_mm(a, w.transpose(1, 2), offs, **options)
    return y.detach(), *torch.autograd.grad(y, (a, w), dy)


def step(recipe: str, M: int = 4096) -> tuple[torch.Tensor, ...]:
    """Return leaves, offs and dY of a layer large enough for the GPU."""
    a, w = leaves(M, 512, 256, 8)
    ends = torch.linspace(0, M, 9, device=DEVICE)[1:].round().int()
    return a, w, ends - ends % 16 * (ends != M), torch.randn(M, 256, device=DEVICE).bfloat16()
