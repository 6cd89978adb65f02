"""Device code that operators share.

Does not launch anything and knows no operator. May import torch and triton.
"""

import torch
import triton
import triton.language as tl

FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}

INTERPRETED = triton.knobs.runtime.interpret
"""True where kernels run in Triton's interpreter: programs run in turn, so none may wait for another."""

IS_CUDA = tl.constexpr(not INTERPRETED and torch.version.hip is None)
"""Whether kernels may hold PTX."""


@triton.jit
def quantize(y, scale, FP8_MAX: tl.constexpr, dtype: tl.constexpr):
    """Saturating cast of fp32 to fp8, round to nearest even; NaN stays NaN."""
    return tl.clamp(y * scale, -FP8_MAX, FP8_MAX, propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def wide(x):
    """x as int64, whether it is a tensor or, in the interpreter's loops, a Python int."""
    return x + tl.zeros((), dtype=tl.int64)


@triton.jit
def held(x):
    """x, unchanged, but no longer known to the compiler as the value it came from.

    A 16-bit tile that is needed on both sides of a reduction is otherwise kept as fp32, in twice the registers.
    """
    if IS_CUDA and x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def pack_bytes(q0, q1, q2, q3):
    """Four fp8 tiles to one of uint32: the bytes of a word come from the four tiles, the first in the lowest byte.

    On sm_90 this is written as byte permutes: from shifts and ors ptxas 12.8 makes wrong code where the fp8 tiles are stored too.
    """
    b0 = q0.to(tl.uint8, bitcast=True)
    b1 = q1.to(tl.uint8, bitcast=True)
    b2 = q2.to(tl.uint8, bitcast=True)
    b3 = q3.to(tl.uint8, bitcast=True)
    if IS_CUDA:
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
def launch_tag(ws_ptr):
    """The number of this launch on its workspace, never 0: what `publish` marks its words with."""
    return tl.load(ws_ptr.to(tl.pointer_type(tl.int32)), volatile=True).to(tl.uint32) + 1


@triton.jit
def close_launch(ws_ptr, tag):
    """Every program of the launch calls this last; the last one to do so gives the next launch another tag."""
    arrived_ptr = ws_ptr.to(tl.pointer_type(tl.int32)) + 32
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(arrived_ptr, 0)
        tl.store(ws_ptr.to(tl.pointer_type(tl.uint32)), tag)


@triton.jit
def publish(ws_ptr, index, value, tag, mask):
    """Store the fp32 `value` with `tag` in one 64-bit word, which other programs of this launch can wait for."""
    word = (tag.to(tl.uint64) << 32) | value.to(tl.uint32, bitcast=True).to(tl.uint64)
    tl.store(ws_ptr + 32 + index, word.to(tl.int64, bitcast=True), mask=mask, cache_modifier=".cg")


@triton.jit
def published(ws_ptr, index):
    """The fp32 values that an earlier launch published."""
    word = tl.load(ws_ptr + 32 + index, cache_modifier=".cg").to(tl.uint64, bitcast=True)
    return (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def await_published(ws_ptr, index, tag):
    """The fp32 values that other programs of this launch publish under `tag`; every thread spins on its own word.

    All programs that publish them must be resident: launch cooperatively.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b64 w;
        .reg .b32 t;
        AGAIN_${:uid}:
        ld.relaxed.gpu.global.b64 w, [$1];
        mov.b64 {$0, t}, w;
        setp.ne.b32 p, t, $2;
        @p bra AGAIN_${:uid};
        }""",
        "=&r,l,r", [(ws_ptr + 32 + index).to(tl.int64), tag], dtype=tl.float32, is_pure=False, pack=1)  # fmt: skip


@triton.jit
def await_published4(ws_ptr, index, STEP: tl.constexpr, tag):
    """`await_published` of the four words at index, index + STEP, …, all in flight together."""
    first = (ws_ptr + 32 + index).to(tl.int64)
    return tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b64 w0, w1, w2, w3;
        .reg .b32 t0, t1, t2, t3;
        AGAIN_${:uid}:
        ld.relaxed.gpu.global.b64 w0, [$4];
        ld.relaxed.gpu.global.b64 w1, [$5];
        ld.relaxed.gpu.global.b64 w2, [$6];
        ld.relaxed.gpu.global.b64 w3, [$7];
        mov.b64 {$0, t0}, w0;
        mov.b64 {$1, t1}, w1;
        mov.b64 {$2, t2}, w2;
        mov.b64 {$3, t3}, w3;
        setp.ne.b32 p, t0, $8;
        setp.ne.or.b32 p, t1, $8, p;
        setp.ne.or.b32 p, t2, $8, p;
        setp.ne.or.b32 p, t3, $8, p;
        @p bra AGAIN_${:uid};
        }""",
        "=&r,=&r,=&r,=&r,l,l,l,l,r",
        [first, first + 8 * STEP, first + 16 * STEP, first + 24 * STEP, tag],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1)  # fmt: skip
