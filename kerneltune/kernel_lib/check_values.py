"""Draw inputs of checks, and give them rows that show mistakes which normal values hide."""

from typing import Any

import torch

_EVERY = 8
_TINY = 2.0**-10
"""Squares of tiny rows are as large as the usual epsilon, 1e-6."""
_CONSTANT = 1.75
"""A power of two times the largest values of e4m3 and e5m2: scales that are rounded up to powers of two are exact there."""
_OFFSET, LARGE = 4.0, 48.0
"""The exponential of a large row overflows unless its maximum is subtracted; products of two fit in fp16."""
_BELOW_ZERO = 3.2
"""Distance of a negative row from zero, in products of the large row's factor and the mean magnitude: exp(-123) is 0 in fp32."""
_KINDS = ("", "equal values", "tiny values", "values far from 0", "negative values", "large values", "zeros", "")
"""Words for the rows that `vary_rows` makes of each eight; empty for a row that it keeps."""


def draw(method: str, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int, *bounds: Any) -> torch.Tensor:
    """Return a new tensor, filled by a method of torch such as `uniform_` and its bounds; without values on device `meta`."""
    x = torch.empty(shape, dtype=dtype, device=device)
    if device != "meta" and x.numel():
        getattr(x, method)(*bounds, generator=torch.Generator(device=device).manual_seed(seed))
    return x


def vary_rows(x: torch.Tensor, large: float = LARGE) -> torch.Tensor:
    """Change six of every eight rows of a contiguous tensor (..., columns) in place, and return the tensor.

    The rows become constant, tiny, negative throughout, large and 0, and a row gets a mean. A mean shows elements of a mask that
    enter a variance, and a divisor that is not the number of columns. A tiny row shows an epsilon in the wrong place. A negative
    row shows a maximum that takes 0 for elements beyond the row; a tensor without negative elements gets none.

    Args:
        large: factor of the large row.
    """
    rows = x.view(-1, max(1, x.shape[-1]))  # also without elements, where view tells no -1
    is_signed, magnitude = bool((rows < 0).any()), rows.float().abs().mean().nan_to_num()
    rows[1::_EVERY] = _CONSTANT  # the mean is exact: other constants leave errors that a division by the deviation makes large
    rows[2::_EVERY] *= _TINY
    rows[3::_EVERY] += (_OFFSET * magnitude).to(x.dtype)
    if is_signed:
        rows[4::_EVERY] = -(_BELOW_ZERO * large * magnitude).to(x.dtype) - rows[4::_EVERY].abs()
    rows[5::_EVERY] *= large
    rows[6::_EVERY] = 0
    return x


def kind_of_row(x: torch.Tensor, row: int) -> str:
    """Return what `vary_rows` made of a row: `large values`; empty for a row that it kept, and for a tensor without its rows."""
    rows, kind = x.reshape(-1, max(1, x.shape[-1])), _KINDS[row % _EVERY]
    is_varied = rows[1::_EVERY].numel() > 0 and bool((rows[1::_EVERY] == _CONSTANT).all())
    return kind if is_varied and (kind != "negative values" or bool((rows[row] < 0).all())) else ""
