"""The public function: checks its tensors, takes the best known config, launches that backend.

Kernel in kernels.py. May import cache, arguments, launch, spec.
"""

import contextvars
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from kerneltune import cache
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, assert_group_ends, check_like, debugging
from kerneltune.kernel_lib.functions import torch_operator
from kerneltune.kernel_lib.groups import GROUP_ALIGNMENT
from kerneltune.kernel_lib.launch import on_its_device, resident
from kerneltune.ops.fp8_grouped_gemm import kernels, scaled_mm
from kerneltune.ops.fp8_grouped_gemm.configs import GemmConfig, default, space, valid
from kerneltune.rounding import cdiv, next_power_of_2

MOST_GROUPS = 1024
_choose = cache.Chooser(
    "fp8_grouped_gemm", GemmConfig, valid, default, ("M", "E"), free_options=("scales", "groups", "values"), space=space
)


@dataclass(frozen=True, slots=True)
class Product:
    """The sizes of a product.

    Attributes:
        groups: how many groups.
        tokens: rows of a, or columns of a where a weight gradient contracts over them.
        rows: of each group's result, 0 where they are its tokens.
        cols: of the result.
        depth: the contraction, 0 where it is the tokens.
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
        """The most rows that all groups can have together."""
        return self.tokens - (self.groups - 1) * GROUP_ALIGNMENT - 1 if self.aligned else self.tokens

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the result."""
        return (self.groups, self.rows, self.cols) if self.rows else (self.tokens, self.cols)

    @property
    def axes(self) -> tuple[tuple[str, int], ...]:
        """Of the operator's case."""
        n, k = (self.rows, self.cols) if self.rows else (self.cols, self.depth)
        tokens = self.tokens - self.groups * GROUP_ALIGNMENT if self.aligned else self.tokens
        return ("M", tokens), ("N", n), ("K", k), ("E", self.groups)


def _results(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    shape = (a.shape[0], b.shape[-1])
    return a.new_empty(shape if b.ndim == 3 else (offs.shape[0], *shape), dtype=out_dtype)


@torch_operator(_results)
@on_its_device
def fp8_grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    aligned: bool = False,
    out: torch.Tensor | None = None,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """Multiply groups of tokens, (a @ b) * scale_a * scale_b, accumulated in fp32 as fast as the tensor cores do.

    With b (E, K, N), groups of rows of a: the forward product and, with transposed weights, the input gradient. With b (M, K),
    groups along the contraction: the weight gradient. Nothing waits for the GPU; M may change without a compilation.

    Args:
        a: e4m3, row-major: (M, K) tokens, or (N, M), the transposed output gradient.
        b: e4m3, column-major: (E, K, N) weights, strides (K N, 1, K), or (M, K) tokens, stride 1 along M. M may be any number;
            where M is contiguous, the other stride is a multiple of 16.
        scale_a, scale_b: fp32, what each fp8 value is to be multiplied with. One element for a whole tensor; for b (E, K, N)
            also (M,) or (M, 1) for a, (E,), (E, N) or (E, 1, N) for b; for b (M, K) also (E,), (E, N) or (E N,) for a, (E,),
            (E, K) or (E K,) for b.
        offs: (E,) int32, where each group's tokens end, not decreasing, at most M. Groups may be empty and of any size. Not read
            by the host: under TRITON_DEBUG=1 the device asserts the order. Without it, groups of offsets in disorder have
            undefined results, and no byte outside the tensors is read or written.
        aligned: for b (M, K), a and b hold aligned groups, as casts with `aligned=True` write them: M is `aligned_size` of the
            tokens, and offs still counts tokens. Side by side, groups that begin at no multiple of 16 are slow.
        out_dtype: bfloat16, float16 or float32.
        out: written and returned, if given.
        config: None takes the best known config.

    Returns:
        (M, N), of which rows past the last group are zeros; or (E, N, K), zeros for empty groups.

    Raises:
        ValueError: a wrong shape, stride, dtype, device or value, which it names.

    Source: torch's _scaled_grouped_mm, its layouts and alignments.
    """
    p = _checked(a, b, offs, aligned)
    mode_a, mode_b = _scale_modes(p, a, scale_a, scale_b)
    if out_dtype not in DTYPE_NAMES:
        raise ValueError(f"out_dtype must be one of {', '.join(DTYPE_NAMES.values())}, got {out_dtype}")
    if out is not None:
        check_like("out", out, p.shape, out_dtype, a.device)
        if not out.is_contiguous():
            raise ValueError(f"out must be contiguous, got strides {out.stride()}")
        if p.rows and out.data_ptr() % 16:
            raise ValueError(f"out must begin at a multiple of 16 bytes, got {out.storage_offset()=}")
    if not p.tokens:
        return torch.zeros(p.shape, dtype=out_dtype, device=a.device) if out is None else out.zero_()
    c = _best(p, DTYPE_NAMES[out_dtype]) if config is None else config
    if c.backend == "cutlass":
        if p.rows:
            raise ValueError(f"{c.backend} takes no groups of any size, which a weight gradient may have")
        if out_dtype != torch.bfloat16:
            raise ValueError(f"{c.backend} gives torch.bfloat16, got {out_dtype=}")
        result = scaled_mm.product(a, b, scale_a, scale_b, offs)
        return result if out is None else out.copy_(result)
    if out is None:
        out = torch.empty(p.shape, dtype=out_dtype, device=a.device)
    _launch(p, a, b, out, scale_a, scale_b, offs, mode_a, mode_b, c)
    return out


def _launch(
    p: Product,
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor,
    mode_a: int,
    mode_b: int,
    c: GemmConfig,
) -> None:
    most_strips = p.groups * cdiv(p.rows, c.rows) if p.rows else p.tokens // c.rows + p.groups
    programs = min(most_strips * cdiv(p.cols, c.cols), resident(a.device, c.ctas))
    x: Any = a
    y: Any = b.transpose(-2, -1)
    z: Any = out
    strides = (x.stride(0), y.stride(0))
    if p.rows:
        z = TensorDescriptor(out, [p.groups, p.rows, p.cols], [p.rows * p.cols, p.cols, 1], [1, c.rows, c.cols // c.parts])
        if p.aligned:
            x = TensorDescriptor(x, [p.rows, p.tokens], [strides[0], 1], [c.rows, c.depth])
            y = TensorDescriptor(y, [p.cols, p.tokens], [strides[1], 1], [c.cols, c.depth])
    else:
        x = TensorDescriptor(x, [p.tokens, p.depth], [strides[0], 1], [c.rows, c.depth])
        y = TensorDescriptor(y, [p.groups * p.cols, p.depth], [p.depth, 1], [c.cols, c.depth])
    arguments = (scale_a, scale_b, offs, p.tokens, *strides)
    sizes = {"ROWS": p.rows, "COLS": p.cols, "E": p.groups, "GROUPS": next_power_of_2(p.groups)}
    modes = {"SCALE_A": mode_a, "SCALE_B": mode_b}
    # descriptors that the kernel makes lie in memory that Triton asks for; the caller's allocator stays as it is
    contextvars.copy_context().run(
        _with_scratch,
        (programs,),
        (x, y, z, *arguments),
        {
            **sizes, **modes, "DEPTH": p.depth, "ALIGNMENT": GROUP_ALIGNMENT if p.aligned else 0, "BM": c.rows, "BN": c.cols,
            "BK": c.depth, "BAND": c.band, "RUN": c.run, "PARTS": c.parts, "STAGES": c.stages, "num_warps": c.warps,
        },
    )  # fmt: skip
    if p.rows and not p.aligned:
        kernels._weight_gradient_of_the_rest[(resident(a.device, 4),)](
            x, y, out, *arguments, **sizes, **modes, BM=32, BN=64, BK=64, num_warps=4
        )


def _with_scratch(grid: tuple[int], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    where = arguments[3].device
    triton.set_allocator(lambda size, _alignment, _stream: torch.empty(size, dtype=torch.int8, device=where))
    kernels._grouped_gemm[grid](*arguments, **constants)


def _best(p: Product, dtype: str) -> GemmConfig:
    """The cached config of the optimized variant for these sizes, or the default; scales do not change which is best."""
    options = (("product", "weights" if p.rows else "rows"), ("scales", "rowwise"), ("groups", "balanced"), ("values", "normal"))
    found: GemmConfig = _choose(p.axes, dtype, "fp8", options)
    return found


def _checked(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, aligned: bool) -> Product:
    """Return the sizes of a product of such tensors.

    Raises:
        ValueError: there is none.
    """
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


def _scale_modes(p: Product, a: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor) -> tuple[int, int]:
    """How many numbers each scale has: 0 one, 1 one per group, 2 one per row of a or column of b in every group.

    Raises:
        ValueError: shapes, types, devices or strides that do not fit.
    """
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
