"""Define inputs, the formula in fp64 and the tolerance of `int4_gemm`, and give weights in the layouts of baselines and peers.

y = x · wᵀ + bias, w = (q - z) s      The formula shares no code with the kernels.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from kerneltune.kernel_lib.agreement import close
from kerneltune.ops.int4_gemm import packing
from kerneltune.ops.int4_gemm.packing import Int4Weight
from kerneltune.spec import Case, Inputs, Outputs, Traffic

OPTIONS = {"group": (64, 32, 128, 0), "zeros": (False, True), "bias": (False, True)}
"""group: elements of k that share a scale, 0 for all; zeros: False for zero points of 8; bias: whether a bias is added."""

_CHUNK_ROWS = 4096
_ENOUGH = 512
"""Fewest elements of y whose mean error is compared: the mean of fewer varies too much between seeds."""
E4M3_ROUNDING = 2.0**-4
"""Largest relative error of rounding to e4m3, which has three bits of mantissa."""


class Forms:
    """Hold the weights of an input set in other layouts. A layout is made at its first use, which is not timed."""

    def __init__(self, weight: Int4Weight) -> None:
        self.weight = weight
        self._others: dict[str, Any] = {}

    @cached_property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return codes (M, K / 2) uint8, k even in the low half; scales and zeros (M, groups) of the same type."""
        codes, scales, zeros = packing.unpack(self.weight)
        return codes[:, 0::2] | (codes[:, 1::2] << 4), scales, None if zeros is None else zeros.to(scales.dtype)

    @cached_property
    def dequantised(self) -> torch.Tensor:
        """Return the weights (M, K) of the scales' type."""
        return packing.dequantise(self.weight, self.weight.scales.dtype)

    def other(self, name: str, make: Callable[["Forms"], Any]) -> Any:
        """Return the result of `make`, which is kept under a name."""
        if name not in self._others:
            self._others[name] = make(self)
        return self._others[name]


def group_size(case: Case) -> int:
    """Return the number of elements of k that share a scale."""
    return int(case.option("group")) or case["K"]


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw x (N, K), packed, scales, zeros and bias as the case has them; weight holds these, forms other layouts."""
    N, M, K, group, dtype = case["N"], case["M"], case["K"], group_size(case), getattr(torch, case.dtype)
    packing.check_sizes(M, K, group)
    shape = packing.scale_shape(M, K, group)
    if device == "meta":
        x = torch.empty((N, K), dtype=dtype, device=device)
        packed = torch.empty(packing.block_shape(M, K), dtype=torch.int32, device=device)
        scales, zeros, bias = (torch.empty(s, dtype=dtype, device=device) for s in (shape, shape, (M,)))
    else:
        generator = torch.Generator(device=device).manual_seed(seed)
        x = torch.randn((N, K), generator=generator, device=device).to(dtype)
        packed = torch.empty(packing.block_shape(M, K), dtype=torch.int32, device=device)
        packed.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
        scales = ((torch.rand(shape, generator=generator, device=device) + 0.5) / 64).to(dtype)
        zeros = torch.randint(0, 17, shape, generator=generator, device=device).to(dtype)
        bias = torch.randn((M,), generator=generator, device=device).to(dtype)
    tensors = {"x": x, "packed": packed, "scales": scales}
    if case.option("zeros"):
        tensors["zeros"] = zeros
    if case.option("bias"):
        tensors["bias"] = bias
    weight = Int4Weight(packed, scales, tensors.get("zeros"), M, K, group)
    return tensors | {"weight": weight, "forms": Forms(weight)}


def reference(inputs: Inputs) -> Outputs:
    """Return y in fp64, spread and rounded.

    spread: the root of the sum of the squares of the products that y adds up. rounded: the product of x with weights rounded
    to its type, in that type.
    """
    x, weight = inputs["x"], inputs["weight"]
    codes, scales, zeros = packing.unpack(weight)
    groups = scales.shape[1]
    x64 = x.double()
    ys, spreads, rounded = [], [], []
    for start in range(0, weight.rows, _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        steps = codes[part].double().view(-1, groups, weight.group)
        steps -= packing.MIDDLE if zeros is None else zeros[part].double()[:, :, None]
        w = (steps * scales[part].double()[:, :, None]).view(-1, weight.depth)
        ys.append(x64 @ w.t())
        spreads.append((x64.square() @ w.square().t()).sqrt())
        rounded.append(x @ w.to(x.dtype).t())
    y, product = torch.cat(ys, 1), torch.cat(rounded, 1)
    if "bias" in inputs:
        y += inputs["bias"].double()
        product = product + inputs["bias"]
    return {"y": y, "spread": torch.cat(spreads, 1), "rounded": product}


def compare(_case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare every element within the rounding of operands and result.

    A variant that casts operands states their largest relative error as the output `rounding`. Without it, y may on average
    be 1.5 times as far from fp64 as the product of x with the rounded weights.
    """
    got, want = outputs["y"], expected["y"]
    unit = torch.finfo(inputs["x"].dtype).eps / 2
    errors = close("y", got, want.float(), 2 * unit, 6 * outputs.get("rounding", unit) * expected["spread"].float())
    if errors or got.numel() < _ENOUGH or "rounding" in outputs:
        return errors
    error = float((got.double() - want).square().mean().sqrt())
    usual = float((expected["rounded"].double() - want).square().mean().sqrt())
    return [f"y: error {error:.3g} against fp64, that of rounded weights is {usual:.3g}"] if error > 1.5 * usual else []


def traffic(case: Case) -> Traffic:
    """Return the bytes of x, codes, scales, zero points and bias read, and of y written; codes and scales in whole blocks."""
    N, M, K = case["N"], case["M"], case["K"]
    kb, rb = packing.block_shape(M, K)[:2]
    scales = torch.Size(packing.scale_shape(M, K, group_size(case))).numel() * (2 if case.option("zeros") else 1)
    bias = M if case.option("bias") else 0
    return Traffic(2 * N * K + kb * rb * 4096 + 2 * scales + 2 * bias, 2 * N * M)


def flops(case: Case) -> int:
    """Return two operations for every weight and token."""
    return 2 * case["N"] * case["M"] * case["K"]


def not_empty(case: Case) -> str | None:
    """Refuse an empty product, which is not worth a call."""
    return "no tokens" if case["N"] == 0 else None
