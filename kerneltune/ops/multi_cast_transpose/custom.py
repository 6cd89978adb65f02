"""`multi_cast_transpose` as torch operators with fakes: what torch.compile and export can trace.

`kerneltune::multi_cast_transpose` changes nothing that it is given, so that it returns amaxes too: torch.compile takes no list
from an operator that changes an argument. `kerneltune::multi_cast_transpose_out` writes into given tensors and raises amaxes in
place. Neither can be differentiated, and neither takes a config.
"""

import torch
from torch import Tensor

from kerneltune.kernel_lib.arguments import check_format
from kerneltune.kernel_lib.tl_lib import FP8_DTYPES
from kerneltune.ops import multi_cast_transpose as multi


@torch.library.custom_op("kerneltune::multi_cast_transpose", mutates_args=())
def multi_cast_transpose(
    xs: list[Tensor], scales: Tensor, amaxes: Tensor, fp8_format: str = "e4m3"
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """xs (M_t, N_t) each to their casts (M_t, N_t), transposes (N_t, M_t), scale_inv (T,) and raised amaxes (T,)."""
    raised = amaxes.clone()
    casts, transposes, scale_inv = multi.multi_cast_transpose(xs, scales, raised, fp8_format)
    return casts, transposes, scale_inv, raised


@multi_cast_transpose.register_fake
def _(
    xs: list[Tensor], scales: Tensor, amaxes: Tensor, fp8_format: str = "e4m3"
) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    dtype = _fp8(fp8_format, scales)
    casts = [x.new_empty(x.shape, dtype=dtype) for x in xs]
    transposes = [x.new_empty((x.shape[1], x.shape[0]), dtype=dtype) for x in xs]
    return casts, transposes, scales.new_empty(scales.shape), amaxes.new_empty(amaxes.shape)


@torch.library.custom_op("kerneltune::multi_cast_transpose_out", mutates_args=("amaxes", "casts", "transposes", "scale_inv"))
def multi_cast_transpose_out(
    xs: list[Tensor],
    scales: Tensor,
    amaxes: Tensor,
    casts: list[Tensor],
    transposes: list[Tensor],
    scale_inv: Tensor,
    skip: Tensor | None = None,
    fp8_format: str = "e4m3",
) -> None:
    """The same into casts, transposes, scale_inv and amaxes; nothing is done where skip (1,) is not 0."""
    outputs = list(zip(casts, transposes, strict=True))
    multi.multi_cast_transpose(xs, scales, amaxes, fp8_format, outputs=outputs, scale_inv=scale_inv, skip=skip)


@multi_cast_transpose_out.register_fake
def _(
    xs: list[Tensor],
    scales: Tensor,
    amaxes: Tensor,
    casts: list[Tensor],
    transposes: list[Tensor],
    scale_inv: Tensor,
    skip: Tensor | None = None,
    fp8_format: str = "e4m3",
) -> None:
    _fp8(fp8_format, scales)


def _fp8(fp8_format: str, scales: Tensor) -> torch.dtype:
    check_format(fp8_format, FP8_DTYPES, scales.device)
    return FP8_DTYPES[fp8_format]
