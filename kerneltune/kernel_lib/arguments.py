"""Check tensor arguments for all operators; an error is a line with the name and the values of the argument."""

from collections.abc import Collection

import torch
from triton import knobs

from kerneltune.kernel_lib.tl_lib import INTERPRETED

DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
ITEMSIZE = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}

MOST_TRANSPOSED_ROWS = (1 << 21) - 1


def check_matrix(name: str, x: torch.Tensor) -> None:
    """Check that x is a matrix of bf16, fp16 or fp32 with contiguous rows on a GPU, in the interpreter or on `meta`."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {x!r}")
    if x.ndim != 2 or x.dtype not in DTYPE_NAMES:
        raise ValueError(f"{name} must be a matrix of {', '.join(DTYPE_NAMES.values())}, got shape {tuple(x.shape)} {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"elements of a row of {name} must be adjacent, got strides {x.stride()}")
    if not (x.is_cuda or INTERPRETED or x.is_meta):
        raise ValueError(f"{name} must be on a GPU, or kernels interpreted (TRITON_INTERPRET=1), got {name} on {x.device}")


def check_like(name: str, t: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> None:
    """Check that a tensor has exactly this shape, dtype and device, and is contiguous if it has a single axis."""
    if not isinstance(t, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {t!r}")
    if t.shape != shape or t.dtype != dtype or t.device != where:
        raise ValueError(f"{name} must be {tuple(shape)} {dtype} on {where}, got {tuple(t.shape)} {t.dtype} on {t.device}")
    if len(shape) == 1 and shape[0] > 1 and t.stride(0) != 1:
        raise ValueError(f"{name} must be contiguous, got strides {t.stride()}")


def check_format(fp8_format: str, known: Collection[str], where: torch.device) -> None:
    """Check that an fp8 format is known and that the device has the format: NVIDIA's GPUs have no fnuz types."""
    if fp8_format not in known:
        raise ValueError(f"fp8_format must be one of {', '.join(known)}, got {fp8_format=}")
    if where.type == "cuda" and torch.version.hip is None and fp8_format.endswith("fnuz"):
        raise ValueError(f"{fp8_format=} needs an AMD GPU (gfx942), got a tensor on {where}")


def check_apart(name: str, x: torch.Tensor, rows: int, numbers: int = 1) -> None:
    """Check that 31 bits can count the words in a tile of `rows` rows of a matrix; a word holds `numbers` elements."""
    limit = (1 << 31) // rows * numbers
    if x.shape[0] > 1 and x.stride(0) >= limit:
        raise ValueError(f"rows of {name} must be less than {limit} numbers apart in tiles of {rows}, got strides {x.stride()}")


def check_transposable(name: str, rows: int) -> None:
    """Check that a matrix can be transposed: kernels count the bytes of a tile of 1024 columns in 31 bits."""
    if rows > MOST_TRANSPOSED_ROWS:
        raise ValueError(f"{name} must have at most {MOST_TRANSPOSED_ROWS} rows to be transposed, got {rows}")


def debugging() -> bool:
    """Return whether operators shall assert properties of arguments that only the device knows: TRITON_DEBUG=1."""
    return bool(knobs.runtime.debug)


def in_pairs(x: torch.Tensor) -> bool:
    """Return whether the rows of x (M, N) hold 16-bit elements that kernels can read in pairs, as int32."""
    even = x.shape[1] % 2 == 0 and x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0
    return x.element_size() == 2 and even
