"""Check the operands of a grouped product, and tell its sizes."""

from dataclasses import dataclass

import torch

from kerneltune.compat import assert_group_ends
from kerneltune.kernel_lib.arguments import debugging
from kerneltune.kernel_lib.groups import GROUP_ALIGNMENT

MOST_GROUPS = 1024
"""Groups of a launch: each program holds the ends of all groups in registers."""


@dataclass(frozen=True, slots=True)
class Product:
    """The sizes of a product.

    Attributes:
        groups: how many groups.
        tokens: rows of a, or columns of a where a weight gradient contracts over them.
        rows: rows of each group's result, 0 where the group's tokens are its rows.
        cols: columns of the result.
        depth: the contraction, 0 where tokens are summed over.
        aligned: whether the columns of a hold aligned groups.
    """

    groups: int
    tokens: int
    rows: int
    cols: int
    depth: int
    aligned: bool = False

    @property
    def most_tokens(self) -> int:
        """Return the largest number of rows that all groups can have together."""
        return self.tokens - (self.groups - 1) * GROUP_ALIGNMENT - 1 if self.aligned else self.tokens

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the result."""
        return (self.groups, self.rows, self.cols) if self.rows else (self.tokens, self.cols)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Return the axes of the operator's case."""
        n, k = (self.rows, self.cols) if self.rows else (self.cols, self.depth)
        tokens = self.tokens - self.groups * GROUP_ALIGNMENT if self.aligned else self.tokens
        return ("M", tokens), ("N", n), ("K", k), ("E", self.groups)


def check_operands(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, aligned: bool) -> Product:
    """Check the operands of a product, and return its sizes."""
    for name, x, ranks in (("a", a, (2,)), ("b", b, (2, 3))):
        if x.dtype != torch.float8_e4m3fn or x.ndim not in ranks:
            raise ValueError(
                f"{name} must be {' or '.join(f'{n}D' for n in ranks)} float8_e4m3fn, got {tuple(x.shape)} {x.dtype}"
            )
    G = offs.shape[0] if offs.ndim == 1 else 0
    if not 1 <= G <= MOST_GROUPS or offs.dtype != torch.int32:
        raise ValueError(f"offs must be int32 of 1 to {MOST_GROUPS} groups, got {tuple(offs.shape)} {offs.dtype}")
    for name, x in (("b", b), ("offs", offs)):
        if x.device != a.device:
            raise ValueError(f"{name} must be on {a.device} as a is, got {x.device}")
    if offs.stride(0) != 1:
        raise ValueError(f"offs must be contiguous, got strides {offs.stride()}")
    p = _forward(a, b, G, aligned) if b.ndim == 3 else _weights(a, b, G, aligned)
    for name, x in (("a", a), ("b", b)):
        if x.numel() and x.data_ptr() % 16:
            raise ValueError(f"{name} must begin at a multiple of 16 bytes, got {x.storage_offset()=}")
    if debugging():
        assert_group_ends(offs, p.most_tokens)
    return p


def _forward(a: torch.Tensor, b: torch.Tensor, groups: int, aligned: bool) -> Product:
    (M, K), (E, depth, N) = a.shape, b.shape
    if aligned:
        raise ValueError(f"aligned groups are those of a weight gradient, b (M, K), got b {tuple(b.shape)}")
    if depth != K or groups != E:
        raise ValueError(f"a (M, K), b (E, K, N) and offs (E,) disagree: {tuple(a.shape)}, {tuple(b.shape)}, ({groups},)")
    _check_sixteenths(("K", K), ("N", N))
    if not b.transpose(1, 2).is_contiguous():
        raise ValueError(f"b must be column-major, strides {(K * N, 1, K)}, got {b.stride()}")
    _check_rows("a", a)
    return Product(groups, M, 0, N, K)


def _weights(a: torch.Tensor, b: torch.Tensor, groups: int, aligned: bool) -> Product:
    (N, M), (tokens, K) = a.shape, b.shape
    if tokens != M:
        raise ValueError(f"a (N, M) and b (M, K) disagree: {tuple(a.shape)}, {tuple(b.shape)}")
    _check_sixteenths(("N", N), ("K", K))
    _check_rows("a", a)
    _check_rows("b.t()", b.t())
    if aligned and (M % GROUP_ALIGNMENT or groups * GROUP_ALIGNMENT > M):
        least = groups * GROUP_ALIGNMENT
        raise ValueError(f"aligned groups take M a multiple of {GROUP_ALIGNMENT}, at least {least}, got M={M} for {groups=}")
    return Product(groups, M, N, K, 0, aligned)


def _check_sixteenths(*sizes: tuple[str, int]) -> None:
    for name, size in sizes:
        if size % 16 or not size:
            raise ValueError(f"{name} must be a multiple of 16 above 0, got {name}={size}")


def _check_rows(name: str, x: torch.Tensor) -> None:
    if x.numel() and (x.stride(1) != 1 or x.stride(0) % 16 or x.stride(0) < x.shape[1]):
        raise ValueError(f"rows of {name} must be contiguous, a multiple of 16 elements apart, got strides {x.stride()}")


def scale_modes(p: Product, a: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> tuple[int, int]:
    """Return how many values each scale has: 0 the tensor, 1 every group, 2 every row of a or column of b of every group."""
    E, M = p.groups, p.tokens
    of_rows: tuple[tuple[int, ...], ...] = ((E, p.rows), (E * p.rows,)) if p.rows else ((M,), (M, 1))
    of_columns: tuple[tuple[int, ...], ...] = ((E, p.cols), (E * p.cols,)) if p.rows else ((E, p.cols), (E, 1, p.cols))
    per_group: tuple[tuple[int, ...], ...] = ((E,),)
    one: tuple[tuple[int, ...], ...] = ((1,), ())
    allowed = (
        ("scale_a", scale_a, (one, per_group if p.rows else (), of_rows)),
        ("scale_b", scale_b, (one, per_group, of_columns)),
    )
    modes = []
    for name, scale, shapes in allowed:
        found = [mode for mode, of_mode in enumerate(shapes) if tuple(scale.shape) in of_mode]
        if not found or scale.dtype != torch.float32 or scale.device != a.device:
            expected = " or ".join(str(shape) for of_mode in shapes for shape in of_mode)
            raise ValueError(
                f"{name} must be {expected} float32 on {a.device}, got {tuple(scale.shape)} {scale.dtype} on {scale.device}"
            )
        if not scale.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {scale.stride()}")
        modes.append(found[0])
    return modes[0], modes[1]
