"""The functions of this package as torch operators `kerneltune::fp8_…` with fakes: what torch.compile and export can trace.

Each has the arguments of the function of its name, without `config`, and returns a list or tuple of tensors. None can be
differentiated: quantisation has no gradient of its own. Results that a layout leaves out are absent from the list.
"""

import torch
from torch import Tensor

from kerneltune.ops.fp8 import both, group_both, groups, rows, tensorwise, transpose
from kerneltune.ops.fp8.common import Cast


@torch.library.custom_op("kerneltune::fp8_rowwise_2d", mutates_args=())
def fp8_rowwise_2d(x: Tensor, fp8_format: str = "e4m3", pow2: bool = True, inverse: bool = False) -> tuple[Tensor, Tensor]:
    """x (M, K) to q (M, K) and scales (M, 1)."""
    return rows.fp8_rowwise_2d(x, fp8_format, pow2=pow2, inverse=inverse)


@fp8_rowwise_2d.register_fake
def _(x: Tensor, fp8_format: str = "e4m3", pow2: bool = True, inverse: bool = False) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=_fp8(x, fp8_format)), _scales(x, x.shape[0], 1)


@torch.library.custom_op("kerneltune::fp8_colwise_3d", mutates_args=())
def fp8_colwise_3d(w: Tensor, fp8_format: str = "e4m3", pow2: bool = True, inverse: bool = False) -> tuple[Tensor, Tensor]:
    """w (E, K, N), column-major, to q of its strides and scales (E, 1, N)."""
    return rows.fp8_colwise_3d(w, fp8_format, pow2=pow2, inverse=inverse)


@fp8_colwise_3d.register_fake
def _(w: Tensor, fp8_format: str = "e4m3", pow2: bool = True, inverse: bool = False) -> tuple[Tensor, Tensor]:
    E, K, N = w.shape
    return w.new_empty((E, N, K), dtype=_fp8(w, fp8_format)).transpose(1, 2), _scales(w, E, 1, N)


@torch.library.custom_op("kerneltune::fp8_rowwise_3d_transpose", mutates_args=())
def fp8_rowwise_3d_transpose(
    w: Tensor, fp8_format: str = "e4m3", pow2: bool = True, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """w (E, K, N), column-major, to q (E, N, K), column-major, and scales (E, K)."""
    return groups.fp8_rowwise_3d_transpose(w, fp8_format, pow2=pow2, inverse=inverse)


@fp8_rowwise_3d_transpose.register_fake
def _(w: Tensor, fp8_format: str = "e4m3", pow2: bool = True, inverse: bool = False) -> tuple[Tensor, Tensor]:
    E, K, N = w.shape
    return w.new_empty((E, K, N), dtype=_fp8(w, fp8_format)).transpose(1, 2), _scales(w, E, K)


@torch.library.custom_op("kerneltune::fp8_rowwise_3d_both", mutates_args=())
def fp8_rowwise_3d_both(
    w: Tensor, fp8_format: str = "e4m3", pow2: bool = True, inverse: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """w (E, K, N), column-major, to q of its strides, scales (E, 1, N), q_t (E, N, K), column-major, and scales (E, K)."""
    q, scale, q_t, scale_t = both.fp8_rowwise_3d_both(w, fp8_format, pow2=pow2, inverse=inverse)
    return q, scale, q_t, scale_t


@fp8_rowwise_3d_both.register_fake
def _(w: Tensor, fp8_format: str = "e4m3", pow2: bool = True, inverse: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    E, K, N = w.shape
    q, q_t = (w.new_empty(shape, dtype=_fp8(w, fp8_format)).transpose(1, 2) for shape in ((E, N, K), (E, K, N)))
    return q, _scales(w, E, 1, N), q_t, _scales(w, E, K)


@torch.library.custom_op("kerneltune::fp8_group_colwise", mutates_args=())
def fp8_group_colwise(
    x: Tensor, offs: Tensor, fp8_format: str = "e4m3", pow2: bool = True, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """x (M, N) with groups of rows to q (M, N), strides (1, M), and scales (G N,)."""
    return groups.fp8_group_colwise(x, offs, fp8_format, pow2=pow2, inverse=inverse)


@fp8_group_colwise.register_fake
def _(x: Tensor, offs: Tensor, fp8_format: str = "e4m3", pow2: bool = True, inverse: bool = False) -> tuple[Tensor, Tensor]:
    M, N = x.shape
    return x.new_empty((N, M), dtype=_fp8(x, fp8_format)).t(), _scales(x, offs.shape[0] * N)


@torch.library.custom_op("kerneltune::fp8_group_colwise_dual", mutates_args=())
def fp8_group_colwise_dual(
    x1: Tensor, x2: Tensor, offs: Tensor, fp8_format: str = "e4m3", pow2: bool = True, inverse: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`fp8_group_colwise` of two matrices: q and scales of the first, q and scales of the second."""
    first, second = groups.fp8_group_colwise_dual(x1, x2, offs, fp8_format, pow2=pow2, inverse=inverse)
    return *first, *second


@fp8_group_colwise_dual.register_fake
def _(
    x1: Tensor, x2: Tensor, offs: Tensor, fp8_format: str = "e4m3", pow2: bool = True, inverse: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (M, N1), N2, G = x1.shape, x2.shape[1], offs.shape[0]
    q1, q2 = (x1.new_empty((N, M), dtype=_fp8(x1, fp8_format)).t() for N in (N1, N2))
    return q1, _scales(x1, G * N1), q2, _scales(x1, G * N2)


@torch.library.custom_op("kerneltune::fp8_group_both", mutates_args=())
def fp8_group_both(
    x: Tensor, offs: Tensor, fp8_format: str = "e4m3", pow2: bool = True, inverse: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (M, K) with groups of rows to q (M, K), scales (M, 1), q_t (M, K), strides (1, M), and scales (G K,)."""
    q, scale, q_t, scale_t = group_both.fp8_group_both(x, offs, fp8_format, pow2=pow2, inverse=inverse)
    return q, scale, q_t, scale_t


@fp8_group_both.register_fake
def _(
    x: Tensor, offs: Tensor, fp8_format: str = "e4m3", pow2: bool = True, inverse: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (M, K), G = x.shape, offs.shape[0]
    q, q_t = x.new_empty((M, K), dtype=_fp8(x, fp8_format)), x.new_empty((K, M), dtype=_fp8(x, fp8_format)).t()
    return q, _scales(x, M, 1), q_t, _scales(x, G * K)


@torch.library.custom_op("kerneltune::fp8_tensorwise_2d", mutates_args=())
def fp8_tensorwise_2d(
    x: Tensor, fp8_format: str = "e4m3", layout: str = "row", pow2: bool = True, inverse: bool = False
) -> list[Tensor]:
    """x (M, K) to q and q_t, as the layout asks, and scale (1,)."""
    return _present(tensorwise.fp8_tensorwise_2d(x, fp8_format, layout=layout, pow2=pow2, inverse=inverse))


@fp8_tensorwise_2d.register_fake
def _(x: Tensor, fp8_format: str = "e4m3", layout: str = "row", pow2: bool = True, inverse: bool = False) -> list[Tensor]:
    return [*_matrices(x, fp8_format, layout), _scales(x, 1)]


@torch.library.custom_op("kerneltune::fp8_tensorwise_3d", mutates_args=())
def fp8_tensorwise_3d(
    w: Tensor, fp8_format: str = "e4m3", layout: str = "row", pow2: bool = True, inverse: bool = False
) -> list[Tensor]:
    """w (E, K, N), column-major, to q and q_t, as the layout asks, and scale (E,)."""
    return _present(tensorwise.fp8_tensorwise_3d(w, fp8_format, layout=layout, pow2=pow2, inverse=inverse))


@fp8_tensorwise_3d.register_fake
def _(w: Tensor, fp8_format: str = "e4m3", layout: str = "row", pow2: bool = True, inverse: bool = False) -> list[Tensor]:
    (E, K, N), dtype = w.shape, tensorwise.checked(fp8_format, True, False, layout, w.device).dtype
    found = [w.new_empty((E, N, K), dtype=dtype).transpose(1, 2)] if layout != "col" else []
    found += [w.new_empty((E, K, N), dtype=dtype).transpose(1, 2)] if layout != "row" else []
    return [*found, _scales(w, E)]


@torch.library.custom_op("kerneltune::fp8_tensorwise_group", mutates_args=())
def fp8_tensorwise_group(
    x: Tensor, offs: Tensor, fp8_format: str = "e4m3", layout: str = "row", pow2: bool = True, inverse: bool = False
) -> list[Tensor]:
    """x (M, K) with groups of rows to q and q_t, as the layout asks, and scale (G,)."""
    return _present(tensorwise.fp8_tensorwise_group(x, offs, fp8_format, layout=layout, pow2=pow2, inverse=inverse))


@fp8_tensorwise_group.register_fake
def _(
    x: Tensor, offs: Tensor, fp8_format: str = "e4m3", layout: str = "row", pow2: bool = True, inverse: bool = False
) -> list[Tensor]:
    return [*_matrices(x, fp8_format, layout), _scales(x, offs.shape[0])]


@torch.library.custom_op("kerneltune::fp8_transpose_2d", mutates_args=())
def fp8_transpose_2d(x: Tensor) -> Tensor:
    """x (M, N) fp8 to (N, M), contiguous."""
    return transpose.fp8_transpose_2d(x)


@fp8_transpose_2d.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]))


def _fp8(x: Tensor, fp8_format: str) -> torch.dtype:
    return Cast(fp8_format, pow2=True, inverse=False, where=x.device).dtype


def _scales(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=torch.float32)


def _present(out: tensorwise.SegmentOutput) -> list[Tensor]:
    return [t for t in out if t is not None]


def _matrices(x: Tensor, fp8_format: str, layout: str) -> list[Tensor]:
    (M, K), dtype = x.shape, tensorwise.checked(fp8_format, True, False, layout, x.device).dtype
    found = [x.new_empty((M, K), dtype=dtype)] if layout != "col" else []
    return found + ([x.new_empty((K, M), dtype=dtype).t()] if layout != "row" else [])
