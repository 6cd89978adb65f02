"""The cast of this package's kernels. Knows no operator. May import tl_lib."""

import triton
import triton.language as tl

from kerneltune.tl_lib import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def to_fp8(y, dtype: tl.constexpr):
    """y, fp32 and no larger than fp8 holds, to nearest even.

    Triton's interpreter casts subnormals of fp32 to anything (3.7.1); they are 0 in every fp8 type.
    """
    if _INTERPRETED:
        y = tl.where(tl.abs(y) < 1.1754943508222875e-38, y * 0.0, y)
    return y.to(dtype)
