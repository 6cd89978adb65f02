"""Round integers up on the host, because a call of Triton's `cdiv` or `next_power_of_2` takes more than a microsecond there."""

ALIGNED = 16
"""Sizes of fp8 operands are multiples of ALIGNED, because TMA and `torch._scaled_mm` read rows at multiples of 16 bytes."""


def cdiv(n: int, divisor: int) -> int:
    """Return n / divisor, rounded up."""
    return -(-n // divisor)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is not less than n; 1 for n < 1."""
    return 1 << max(0, n - 1).bit_length()
