"""Compare two tensors and say in a line where they disagree, for the `compare` functions of operators.

Knows no operator. May import torch.
"""

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def close(name: str, got: torch.Tensor, want: torch.Tensor, rtol: float, atol: float | torch.Tensor) -> list[str]:
    """Equal within atol + rtol |want|; NaN agrees with NaN, infinity with itself."""
    if got.shape != want.shape:
        return [f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"]
    got32, want32 = got.float(), want.float()
    same = (got32 == want32) | (got32.isnan() & want32.isnan())
    near = want32.isfinite() & ((got32 - want32).abs() <= atol + rtol * want32.abs())
    return _report(name, ~(same | near), got32, want32)


def same_bits(name: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    """Equal in shape, dtype and every bit; any NaN agrees with any NaN."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{name}: {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"]
    bits = _BITS[got.dtype.itemsize]
    wrong = got.view(bits) != want.view(bits)
    if not bool(wrong.any()):
        return []  # without the memory of fp32 copies
    got32, want32 = got.float(), want.float()
    return _report(name, wrong & ~(got32.isnan() & want32.isnan()), got32, want32)


def within_a_step(name: str, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    """fp8, equal or neighbours: of numbers that differ in their last place before the cast. NaN agrees with NaN alone."""

    def ordered(q: torch.Tensor) -> torch.Tensor:  # fp8 is sign and magnitude: neighbours differ by one in the byte
        byte = q.view(torch.uint8).to(torch.int16)
        return torch.where(byte >= 128, 128 - byte, byte)

    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{name}: {tuple(got.shape)} {got.dtype}, expected {tuple(want.shape)} {want.dtype}"]
    got32, want32 = got.float(), want.float()
    near = ((ordered(got) - ordered(want)).abs() <= 1) & (got32.isnan() == want32.isnan())
    return _report(name, ~(near | (got32.isnan() & want32.isnan())), got32, want32)


def _report(name: str, wrong: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> list[str]:
    count = int(wrong.sum())
    if not count:
        return []
    first = tuple(int(i) for i in wrong.nonzero()[0])
    unwritten = int((wrong & got.isnan() & ~want.isnan()).sum())
    hint = f"; {unwritten} are NaN, as elements that are never written" if unwritten else ""
    values = f"{float(got[first]):.6g}, expected {float(want[first]):.6g}"
    return [f"{name}: {count} of {wrong.numel()} wrong, first at {first}: {values}{hint}"]
