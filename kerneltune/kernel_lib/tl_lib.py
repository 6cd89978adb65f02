"""Define device functions that operators share. The module launches nothing and knows no operator."""

import torch
import triton
import triton.language as tl
from triton.language import target_info

FP8_DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}
TL_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
"""torch's type of an element -> Triton's type."""

TL_FP8 = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5, "e4m3fnuz": tl.float8e4b8, "e5m2fnuz": tl.float8e5b16}

FP8_MAX = {name: torch.finfo(dtype).max for name, dtype in FP8_DTYPES.items()}

INTERPRETED = triton.knobs.runtime.interpret
"""True if kernels run in Triton's interpreter, which runs programs in sequence: no program may wait for a later program."""

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.constexpr_function
def is_cuda():
    """Return whether kernels may contain PTX, because they are compiled, here or ahead of time, for an NVIDIA GPU."""
    return not INTERPRETED and target_info.is_cuda()


@triton.constexpr_function
def since_sm_90():
    """Return whether kernels may contain PTX of sm_90: packed 16-bit maxima, launches that begin before the last has ended."""
    return not INTERPRETED and target_info.cuda_capability_geq(9, 0)


@triton.jit
def saturate(y, FP8_MAX: tl.constexpr):
    """Return fp32 values limited to the range of fp8; NaN stays NaN. On CUDA return y, because the conversion saturates."""
    if is_cuda():
        return y
    else:
        return tl.clamp(y, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quantize(y, scale, FP8_MAX: tl.constexpr, dtype: tl.constexpr):
    """Multiply fp32 values by a scale and cast to fp8, saturating, to nearest even; NaN stays NaN."""
    return saturate(y * scale, FP8_MAX).to(dtype)


@triton.jit
def reciprocal(x):
    """Return 1 / x, correctly rounded."""
    return tl.div_rn(tl.zeros_like(x) + 1.0, x)


@triton.jit
def amax_to_scale(amax, FP8_MAX: tl.constexpr, POW2: tl.constexpr):
    """Return the multiplier fp32(FP8_MAX / max(amax, 1e-12)), rounded down to a power of two under POW2.

    NaN gives NaN, infinity gives 0. The power of two comes from exponents alone: the quotient's exponent is smaller by 1 where
    the divisor has the larger mantissa.
    """
    limit = tl.zeros_like(amax) + FP8_MAX
    finite = tl.maximum(amax, 1e-12)
    if POW2:
        bits = finite.to(tl.uint32, bitcast=True)
        limit_bits = limit.to(tl.uint32, bitcast=True)
        short = ((bits & 0x7FFFFF) > (limit_bits & 0x7FFFFF)).to(tl.uint32)
        exponent = (limit_bits >> 23) + 127 - (bits >> 23) - short
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(limit, finite)
    return tl.where(amax < float("inf"), scale, tl.where(amax == amax, 0.0, amax))


@triton.jit
def magnitude(x):
    """Return |x| as the integer of its bits, which has the order of the values, with NaN above infinity."""
    if x.dtype.primitive_bitwidth == 32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return x.to(tl.int16, bitcast=True) & 0x7FFF


@triton.jit
def magnitude_of_pairs(w0, w1, w2, w3):
    """Return the largest `magnitude` of four tiles of int32 pairs, element by element and half by half."""
    if since_sm_90():
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d;
            and.b32 a, $1, 0x7fff7fff;
            and.b32 b, $2, 0x7fff7fff;
            and.b32 c, $3, 0x7fff7fff;
            and.b32 d, $4, 0x7fff7fff;
            max.s16x2 a, a, b;
            max.s16x2 c, c, d;
            max.s16x2 $0, a, c;
            }""",
            "=r,r,r,r,r", [w0, w1, w2, w3], dtype=tl.int32, is_pure=True, pack=1)  # fmt: skip
    else:
        low = tl.maximum(tl.maximum(w0 & 0x7FFF, w1 & 0x7FFF), tl.maximum(w2 & 0x7FFF, w3 & 0x7FFF))
        high = tl.maximum(
            tl.maximum((w0 >> 16) & 0x7FFF, (w1 >> 16) & 0x7FFF), tl.maximum((w2 >> 16) & 0x7FFF, (w3 >> 16) & 0x7FFF)
        )
        return (high << 16) | low


@triton.jit
def larger_pairs(m, n):
    """Return the larger `magnitude` of two tiles of int32 pairs, element by element and half by half."""
    if since_sm_90():
        return tl.inline_asm_elementwise("max.s16x2 $0, $1, $2;", "=r,r,r", [m, n], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return tl.maximum(m & 0xFFFF, n & 0xFFFF) | (tl.maximum(m >> 16, n >> 16) << 16)


@triton.jit
def _half_to_fp32(w, HALF: tl.constexpr, dtype: tl.constexpr):
    """Return the lower (HALF 0) or upper (1) 16-bit value of int32 words as fp32."""
    if dtype == tl.bfloat16:
        return (w & -65536 if HALF else w << 16).to(tl.float32, bitcast=True)
    else:
        return (w >> (16 * HALF)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def values(x, HALF: tl.constexpr, PAIRS: tl.constexpr, dtype: tl.constexpr):
    """Return the values of a tile, or under PAIRS of a half of each of its words, as fp32."""
    return _half_to_fp32(x, HALF, dtype) if PAIRS == 2 else x.to(tl.float32)


@triton.jit
def magnitude_to_fp32(m, dtype: tl.constexpr):
    """Return the fp32 value of a `magnitude` of that dtype; m may have been widened to int32."""
    if dtype.primitive_bitwidth == 32:
        return m.to(tl.float32, bitcast=True)
    else:
        return m.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def wide(x):
    """Return x as int64, whether it is a tensor or, in the interpreter's loops, a Python int."""
    return x + tl.zeros((), dtype=tl.int64)


@triton.jit
def aligned_start(start, group, ALIGNMENT: tl.constexpr):
    """Return the column at which the group that begins at row `start` of the tokens begins under `aligned` groups (groups.py)."""
    return (start // ALIGNMENT + group) * ALIGNMENT


@triton.jit
def only_if(mask, flag):
    """Return mask & flag as a mask; mask is a tensor of booleans, flag the outcome of comparing scalars.

    Triton's interpreter (3.7.1, 3.9.0) spreads the outcome of comparing two int32 over a tensor as int32, and 3.9's takes no mask
    of that.
    """
    if _INTERPRETED:
        return (mask & flag) != 0
    return mask & flag


@triton.jit
def load_constant(ptr):
    """Load a 32-bit scalar that no other program changes; not pipelined through shared memory, as `tl.load` would be."""
    if is_cuda():
        return tl.inline_asm_elementwise(
            "ld.global.ca.b32 $0, [$1];", "=r,l", [ptr.to(tl.int64)], dtype=ptr.dtype.element_ty, is_pure=True, pack=1
        )
    return tl.load(ptr)


@triton.jit
def store_here(ptr, value, mask):
    """Store 32-bit values from the threads that hold them; `tl.store` would first move them to other threads, over barriers.

    Several threads may hold the same element, and store the same value.
    """
    if is_cuda():
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r", [ptr.to(tl.int64), value, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
    else:
        tl.store(ptr, value, mask=mask)


@triton.jit
def held(x):
    """Return x through a `mov` that hides its origin from the compiler.

    The compiler otherwise keeps 16-bit values that are needed on both sides of a reduction as fp32, in twice the registers.
    """
    if is_cuda() and x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    elif is_cuda() and x.dtype == tl.int32:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    return x


@triton.jit
def to_fp8(y, dtype: tl.constexpr):
    """Cast fp32 values within the range of fp8 to nearest even.

    Triton's interpreter casts subnormals of fp32 to anything (3.7.1); they are 0 in every fp8 type.
    """
    if _INTERPRETED:
        y = tl.where(tl.abs(y) < 1.1754943508222875e-38, y * 0.0, y)
    return y.to(dtype)


@triton.jit
def to_fp8_pair(low, high, dtype: tl.constexpr):
    """Cast two tiles as `to_fp8` does, and return a tile of int16 with `low` in the lower byte."""
    if is_cuda() and dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,r,r", [low, high], dtype=tl.int16, is_pure=True, pack=1
        )
    elif is_cuda() and dtype == tl.float8e5:
        return tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;", "=h,r,r", [low, high], dtype=tl.int16, is_pure=True, pack=1
        )
    else:
        lower = to_fp8(low, dtype).to(tl.uint8, bitcast=True).to(tl.int16)
        return lower | (to_fp8(high, dtype).to(tl.uint8, bitcast=True).to(tl.int16) << 8)


@triton.jit
def to_fp8_words(y0, y1, y2, y3, dtype: tl.constexpr):
    """Cast four tiles as `to_fp8` does, and return a tile of uint32 whose words have a byte of each, the first tile's lowest."""
    if is_cuda() and dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,r,r,r,r", [y0, y1, y2, y3], dtype=tl.uint32, is_pure=True, pack=1)  # fmt: skip
    elif is_cuda() and dtype == tl.float8e5:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,r,r,r,r", [y0, y1, y2, y3], dtype=tl.uint32, is_pure=True, pack=1)  # fmt: skip
    else:
        return pack_bytes(to_fp8(y0, dtype), to_fp8(y1, dtype), to_fp8(y2, dtype), to_fp8(y3, dtype))


@triton.jit
def pack_bytes(q0, q1, q2, q3):
    """Return a tile of uint32 whose words have a byte of each of four fp8 tiles, the first tile's in the lowest byte.

    The function uses byte permutes, because ptxas 12.8 makes wrong code of shifts and ors if the fp8 tiles are stored too.
    """
    b0 = q0.to(tl.uint8, bitcast=True)
    b1 = q1.to(tl.uint8, bitcast=True)
    b2 = q2.to(tl.uint8, bitcast=True)
    b3 = q3.to(tl.uint8, bitcast=True)
    if is_cuda():
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t0, t1, t2, t3;
            prmt.b32 t0, $4, $5, 0x5140;
            prmt.b32 t1, $6, $7, 0x5140;
            prmt.b32 t2, $4, $5, 0x7362;
            prmt.b32 t3, $6, $7, 0x7362;
            prmt.b32 $0, t0, t1, 0x5410;
            prmt.b32 $1, t0, t1, 0x7632;
            prmt.b32 $2, t2, t3, 0x5410;
            prmt.b32 $3, t2, t3, 0x7632;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r", [b0, b1, b2, b3], dtype=tl.uint32, is_pure=True, pack=4)  # fmt: skip
    return b0.to(tl.uint32) | (b1.to(tl.uint32) << 8) | (b2.to(tl.uint32) << 16) | (b3.to(tl.uint32) << 24)


@triton.jit
def words_of_pairs(p0, p1, p2, p3):
    """Return two tiles of uint32 out of four tiles of int16: the words of the lower bytes, and the words of the upper bytes.

    The first tile's bytes are the lowest. Byte permutes, as in `pack_bytes`.
    """
    if is_cuda():
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t0, t1, t2, t3;
            prmt.b32 t0, $4, $5, 0x5140;
            prmt.b32 t1, $6, $7, 0x5140;
            prmt.b32 t2, $4, $5, 0x7362;
            prmt.b32 t3, $6, $7, 0x7362;
            prmt.b32 $0, t0, t1, 0x5410;
            prmt.b32 $1, t2, t3, 0x5410;
            prmt.b32 $2, t0, t1, 0x7632;
            prmt.b32 $3, t2, t3, 0x7632;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r", [p0, p1, p2, p3], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=2)  # fmt: skip
    else:
        w0 = p0.to(tl.uint16, bitcast=True).to(tl.uint32)
        w1 = p1.to(tl.uint16, bitcast=True).to(tl.uint32)
        w2 = p2.to(tl.uint16, bitcast=True).to(tl.uint32)
        w3 = p3.to(tl.uint16, bitcast=True).to(tl.uint32)
        lower = (w0 & 0xFF) | ((w1 & 0xFF) << 8) | ((w2 & 0xFF) << 16) | ((w3 & 0xFF) << 24)
        upper = (w0 >> 8) | ((w1 >> 8) << 8) | ((w2 >> 8) << 16) | ((w3 >> 8) << 24)
        return lower, upper


@triton.jit
def to_pairs(low, high, dtype: tl.constexpr):
    """Round two tiles of fp32 to a 16-bit type, and return a tile of int32 words with `low` in the lower half."""
    if is_cuda() and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    elif is_cuda() and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        lower = low.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        upper = high.to(dtype).to(tl.uint16, bitcast=True).to(tl.uint32)
        return (lower | (upper << 16)).to(tl.int32, bitcast=True)
