"""FP8 casts with fresh scales: the formula, the options and the checks that the operators of this family share.

    s = fp32(FP8_MAX / max(amax, 1e-12)), rounded down to a power of two if asked       q = fp8(x * s), to nearest even

A scale of these operators is the multiplier s; with `inverse` it is the factor 1 / s of the cast values (x ≈ q / s), as in nn.
q_t (M, K) is column-major: the bytes of the transpose. amax is the largest |x| of all elements that share a scale. NaN is not
sanitised: its scale and all elements under it become NaN. Infinity gives multiplier 0: finite elements become 0, infinite
elements NaN. Source: torchao's amax_to_scale and to_fp8_saturated. The formula shares no code with the kernels.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from kerneltune.compat import assert_group_ends
from kerneltune.kernel_lib.agreement import all_same_bits
from kerneltune.kernel_lib.arguments import DTYPE_NAMES, ITEMSIZE, check_format, debugging
from kerneltune.kernel_lib.constants import Constants
from kerneltune.kernel_lib.groups import bounds, group_ends
from kerneltune.kernel_lib.tl_lib import FP8_MAX
from kerneltune.spec import Case, Inputs, Option, Traffic

FP8 = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}
"""torch's type of each fp8 format."""

OPTIONS: dict[str, tuple[Option, ...]] = {
    "fp8_format": tuple(FP8),
    "pow2": (True, False),
    "inverse": (False, True),
    "special": (False, True),
}
"""Type of the output; power-of-two scales; factors instead of multipliers; rows of zeros, subnormals, NaN and infinity in x."""

GROUP_OPTIONS: dict[str, tuple[Option, ...]] = {**OPTIONS, "groups": ("balanced", "zipf", "ragged")}
"""The options of token groups: the options of every cast, and how unequal the groups are."""

CALL_OPTIONS: tuple[tuple[str, Option], ...] = tuple((name, values[0]) for name, values in OPTIONS.items())
"""The options under which a call looks its config up.

Of the other values only pow2=False may change the best config, because tensor-wise casts then read x twice.
"""

GROUP_CALL_OPTIONS: tuple[tuple[str, Option], ...] = tuple((name, values[0]) for name, values in GROUP_OPTIONS.items())
"""The options under which a call on token groups looks its config up: the host does not know the sizes of the groups."""

Pair = tuple[torch.Tensor, torch.Tensor]
"""A cast and its scales."""


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Draw the arguments of the operator's function.

    Args:
        case: its axes name the tensors: x (M, columns), x1 and x2 (M, N1) and (M, N2), or w (E, K, N), column-major; offs
            (G,).
        device: where; without values on `meta`.
        seed: the seed of the random values.
    """
    sizes, dtype, special = dict(case.axes), getattr(torch, case.dtype), bool(case.option("special"))
    tensors = {}
    if "E" in sizes:
        tensors["w"] = values((sizes["E"], sizes["N"], sizes["K"]), dtype, device, seed, special).transpose(1, 2)
    elif "N1" in sizes:
        tensors |= {f"x{i}": values((sizes["M"], sizes[f"N{i}"]), dtype, device, seed + i, special) for i in (1, 2)}
    else:
        tensors["x"] = values((sizes["M"], sizes["K" if "K" in sizes else "N"]), dtype, device, seed, special)
    if "G" in sizes:
        tensors["offs"] = group_ends(case, sizes["G"], device, seed)
    told = ("fp8_format", "pow2", "inverse", "layout")
    return tensors | {name: value for name, value in case.options if name in told}


def values(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int, special: bool = False) -> torch.Tensor:
    """Draw from a normal distribution, the columns and rows of each matrix in eight magnitudes."""
    x = torch.empty(shape, dtype=dtype, device=device)
    if device == "meta" or not x.numel():
        return x
    generator = torch.Generator(device=device).manual_seed(seed)
    x.normal_(generator=generator)
    for axis in (-1, -2):
        size = [1] * x.ndim
        size[axis] = x.shape[axis]
        x *= torch.exp2(torch.randint(-3, 5, size, generator=generator, device=device)).to(dtype)
    if special:
        _plant(x.view(-1, x.shape[-1]))
    return x


def _plant(x: torch.Tensor) -> None:
    """Put special values at both ends of a matrix, so that tiles at its edges cast special values."""
    tiny = 2.0**-24 if x.dtype == torch.float16 else 2.0**-130
    for row, value in ((0, 0.0), (1, tiny), (2, torch.nan), (3, torch.inf), (4, -torch.inf)):
        if row < x.shape[0]:
            x[row] = value if row < 2 else x[row]
            x[row, -1] = value
    for column, value in ((0, 0.0), (1, tiny)):
        if column + 8 < x.shape[1]:
            x[:, column + 8] = value


def multiplier_of(amax: torch.Tensor, fp8_format: str, pow2: bool) -> torch.Tensor:
    """Return the multiplier of elements whose largest magnitude is amax."""
    multiplier = (torch.finfo(FP8[fp8_format]).max / amax.double().clamp(min=1e-12)).float()
    if not pow2:
        return multiplier
    return torch.where(multiplier.isnan(), multiplier, (multiplier.view(torch.int32) & 0x7F800000).view(torch.float32))


def quantized(x: torch.Tensor, axis: int, inputs: Inputs) -> Pair:
    """Cast x with one scale per slice along `axis`, which is kept; return the cast and the scales, factors under `inverse`."""
    dtype = FP8[inputs["fp8_format"]]
    amax = x.abs().amax(axis, keepdim=True) if x.shape[axis] else x.sum(axis, keepdim=True)
    multiplier = multiplier_of(amax, inputs["fp8_format"], inputs["pow2"])
    limit = torch.finfo(dtype).max
    q = (x.float() * multiplier).clamp(-limit, limit).to(dtype)
    return q, 1.0 / multiplier if inputs["inverse"] else multiplier


def quantized_groups(x: torch.Tensor, inputs: Inputs) -> Pair:
    """Cast x (M, N) over the rows of every group; return the cast and the scales (G N,)."""
    parts = [quantized(x[start:end], 0, inputs) for start, end in bounds(inputs["offs"])]
    q = torch.cat([q.view(torch.uint8) for q, _ in parts]).view(parts[0][0].dtype)
    return q, torch.cat([scale.reshape(-1) for _, scale in parts])


def cast_traffic(case: Case, scales: int, copies: int = 1) -> Traffic:
    """Return the bytes of input and group ends read once, and of so many copies of the cast and fp32 scales written."""
    sizes = dict(case.axes)
    if "E" in sizes:
        elements = sizes["E"] * sizes["K"] * sizes["N"]
    else:
        elements = sizes["M"] * sum(size for axis, size in sizes.items() if axis not in ("M", "G"))
    return Traffic(ITEMSIZE[case.dtype] * elements + 4 * sizes.get("G", 0), copies * elements + 4 * scales)


CONTRACT: dict[str, Any] = {
    "dtypes": ("bfloat16", "float16", "float32"),
    "quants": ("fp8",),
    "inputs": inputs,
    "compare": all_same_bits,
}
"""The fields of `Op` that all casts share."""

CAST: dict[str, Any] = {**CONTRACT, "options": OPTIONS, "free_options": tuple(OPTIONS)}
"""The fields of `Op` that casts of matrices and weights with a scale per row or column share."""

GROUP_DISTANCE = 0.5
"""Largest log2 distance of a near entry for groups of rows: the best config changes with the rows of a group, M / G.

Leaving shapes out, H200, 2026-11-26, with 0.5 and with 1: `fp8_group_colwise_dual` 1.03 and 1.00 of the tuned speed,
`fp8_tensorwise_group` 1.00 and 0.99, worst 0.98 and 0.89.
"""

GROUP_CAST: dict[str, Any] = {
    **CONTRACT,
    "max_distance": GROUP_DISTANCE,
    "options": GROUP_OPTIONS,
    "free_options": tuple(GROUP_OPTIONS),
}
"""The fields of `Op` that casts of token groups with a scale per row or column share."""


@dataclass(frozen=True, eq=False, repr=False)
class Scaling(Constants):
    """Hold the constants by which a kernel makes scales.

    Attributes:
        fp8_max: the largest finite value of the cast's type.
        pow2: whether multipliers are rounded down to a power of two.
        inverse: whether factors, 1 / multiplier, are written.
    """

    fp8_max: float
    pow2: bool
    inverse: bool


@dataclass(frozen=True, slots=True)
class Cast:
    """Hold the rounding and scaling of a cast to fp8.

    Attributes:
        fp8_format: a key of `FP8`.
        pow2: whether multipliers are rounded down to powers of two.
        inverse: whether factors, 1 / multiplier, are returned.
    """

    fp8_format: str
    pow2: bool
    inverse: bool

    @property
    def scaling(self) -> "Scaling":
        """Return the constants by which a kernel makes scales."""
        return Scaling.of(fp8_max=FP8_MAX[self.fp8_format], pow2=self.pow2, inverse=self.inverse)

    @property
    def scale_of_nothing(self) -> float:
        """Return the scale of amax 0, rounded as the kernels round it."""
        scale = float(torch.tensor(FP8_MAX[self.fp8_format] / 1e-12, dtype=torch.float32))
        scale = 2.0 ** math.floor(math.log2(scale)) if self.pow2 else scale
        return 1.0 / scale if self.inverse else scale


def fp8_dtype(fp8_format: str, device: torch.device) -> torch.dtype:
    """Return torch's type of an fp8 format, which the device must support."""
    check_format(fp8_format, FP8, device)
    return FP8[fp8_format]


def check_weights(name: str, w: torch.Tensor) -> None:
    """Check expert weights (E, K, N) of bf16, fp16 or fp32 in column-major order."""
    if w.ndim != 3 or w.dtype not in DTYPE_NAMES:
        raise ValueError(f"{name} must be (E, K, N) of {', '.join(DTYPE_NAMES.values())}, got shape {tuple(w.shape)} {w.dtype}")
    if w.numel() and not w.transpose(1, 2).is_contiguous():
        raise ValueError(f"{name} must be column-major, strides {(w.shape[1] * w.shape[2], 1, w.shape[1])}, got {w.stride()}")


def check_offs(offs: torch.Tensor, M: int, device: torch.device) -> None:
    """Check group ends (G,) int32: on the device, contiguous, at least one group.

    Under TRITON_DEBUG=1 the device asserts that they are ends within M rows.
    """
    if offs.ndim != 1 or offs.shape[0] == 0 or offs.dtype != torch.int32 or offs.device != device:
        raise ValueError(f"offs must be (G,) int32 on {device}, got {tuple(offs.shape)} {offs.dtype} on {offs.device}")
    if offs.shape[0] > 1 and offs.stride(0) != 1:
        raise ValueError(f"offs must be contiguous, got strides {offs.stride()}")
    if debugging():
        assert_group_ends(offs, M)


def contiguous_result(
    name: str, given: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a new contiguous tensor, or the given tensor, whose form is checked."""
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return _checked(name, given, given, shape, dtype, device, "contiguous")


def column_major_result(
    name: str, given: torch.Tensor | None, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a new tensor whose last two axes are column-major, or the given tensor, whose form is checked."""
    if given is None:
        return torch.empty((shape[0], shape[2], shape[1]), dtype=dtype, device=device).transpose(1, 2)
    return _checked(name, given, given.transpose(-2, -1), shape, dtype, device, "column-major")


def _checked(
    name: str,
    given: torch.Tensor,
    in_order: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    order: str,
) -> torch.Tensor:
    if given.shape != shape or given.dtype != dtype or given.device != device or not in_order.is_contiguous():
        raise ValueError(
            f"{name} must be {order} {tuple(shape)} {dtype} on {device}, "
            f"got {tuple(given.shape)} {given.dtype} on {given.device}, strides {given.stride()}"
        )
    return given
