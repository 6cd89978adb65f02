"""Multiply tokens in e4m3 by the weights of `int4_gemm`; axes and formula as there.

A token is cast with a scale of its own. Codes become e4m3 without rounding, so that the cast of the tokens is the only rounding
in front of the sums.
"""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kerneltune import cache
from kerneltune.kernel_lib.arguments import check_like, check_matrix
from kerneltune.kernel_lib.functions import custom_op
from kerneltune.kernel_lib.launch import on_its_device, too_much_shared
from kerneltune.kernel_lib.tl_lib import FP8_MAX, INTERPRETED, since_sm_90
from kerneltune.kernel_lib.workspace import counters
from kerneltune.ops.int4_gemm import configs, gemm, reference
from kerneltune.ops.int4_gemm.estimate import TIMES, ShapeCost, StepTimes, product_us, reads_us, shape_cost, sms, warps_of
from kerneltune.ops.int4_gemm.kernels.fp8 import Fp8Work, cast_rows, norm_rows
from kerneltune.ops.int4_gemm.kernels.fp8 import int4_fp8_gemm as kernel
from kerneltune.ops.int4_gemm.packing import DEPTH, ROWS, Int4Weight
from kerneltune.rounding import cdiv, next_power_of_2
from kerneltune.spec import Case, Inputs, Op, Outputs, Space, Variant

_LEAD = 4
"""Steps of w that L2 is asked for while the cast of the tokens runs: 32 KB for a program of 128 rows."""
_CAST_BLOCK = 4096
"""Elements of a token that a program casts at a time."""
_NORM_BLOCK = 16384
"""Most elements of a row that a program normalizes, because it holds the row: 16 elements a thread."""
_SPLITS = (1, 2, 3, 4, 6, 8)
"""Counts of programs that may share a row of w."""
_EARLY = 24
"""Tokens up to which programs begin early. H100, 2026-11-26, medians of 4,153 pairs of configs: 0.8 µs less for 12 and 16 tokens;
from 40 tokens on 4 to 28 µs more where an SM could hold further programs."""
_RAW = 64
"""Tokens up to which raw codes win: H200, 2026-11-29, fastest configs of 15 cases, 1.01x to 1.43x; with 128 they lose 3 %."""
_HELD_OF_RAW = {(16, False): 5, (32, False): 4, (64, False): 3, (16, True): 4, (32, True): 3, (64, True): 3}
"""Programs of raw codes with one block of rows of w and steps of two blocks of k that an SM holds, by rows of x and whether there
are zero points (`inspect int4_fp8_gemm`, sm_90)."""
_TWO_AT_ONCE = 0.93
"""Share of the time that steps of two blocks of k take, with exact codes and up to 64 rows of x: H200, 2026-11-29, 38 cases."""
_HELD_OF_TWO = {(32, 1): 5, (32, 2): 3, (64, 1): 3, (64, 2): 2}
"""Programs with steps of two blocks of k that an SM holds, by rows of x and blocks of w (`inspect int4_fp8_gemm`, sm_90)."""
_MOST_PROGRAMS = 2048
"""Most programs of a product of several splits, because each split has memory for its part."""


@dataclass(frozen=True, slots=True)
class Int4Fp8Config:
    """Config of a product.

    Attributes:
        tokens: rows of x per program.
        blocks: blocks of 64 rows of w per program.
        warps: warps of a program; four warps multiply 64 rows of w at once.
        splits: programs that share a row of w.
        stages: stages of the load pipeline.
        early: whether the kernel begins while the cast of x still runs, and asks L2 for the first blocks of w.
        k_blocks: blocks of 128 k per step.
        rest: 16 or 32 multiplies codes as they are, and adds the rest of as many groups of k at once; 0 multiplies q - 8, and
            counts as 16 for a weight with zero points.
    """

    tokens: int
    blocks: int
    warps: int
    splits: int
    stages: int
    early: bool
    k_blocks: int = 1
    rest: int = 0


class Fp8Tokens(NamedTuple):
    """Hold tokens cast to e4m3, an operand of `int4_fp8_gemm`; `cast_tokens` and `norm_tokens` make it.

    Attributes:
        q: (N, ⌈K/128⌉ 128) float8_e4m3fn, contiguous, zeros past K; each 32 k are in the order `kernels.fp8.ORDER`.
        scale: (N,) or (1,) float32: an element of x is its q times its scale.
        sums: (N, 2, 5, ⌈K/128⌉) float32, sums of q / 512 over k: [n, 1, i, b] over quarter i of block b, [n, 1, 4, b] over the
            whole block; [n, 0] the same with q times 7 where k & 2, else times -8.
        depth: K.
        dtype: type of x and of y: fp16 or bf16.
    """

    q: torch.Tensor
    scale: torch.Tensor
    sums: torch.Tensor
    depth: int
    dtype: torch.dtype


def cast_tokens(x: torch.Tensor) -> Fp8Tokens:
    """Cast every row of x (N, K) of fp16 or bf16 to e4m3 with a scale of its own, in a launch.

    The largest element of a row becomes 448, so nothing overflows. A row with NaN or infinity becomes NaN, other rows do not.

    Args:
        x: (N, K); rows may be any distance apart, elements of a row must be adjacent.
    """
    return tokens_of(x, rest=16)


def tokens_of(x: torch.Tensor | Fp8Tokens, rest: int) -> Fp8Tokens:
    """Return x as tokens, cast if they are not yet. The cast writes sums only if a launch has a rest."""
    return x if isinstance(x, Fp8Tokens) else Fp8Tokens(*_cast(x, reorder=True, has_sums=rest > 0), x.shape[1], x.dtype)


def cast_in_order(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast x (N, K) as `cast_tokens` does, to q (N, K) and scale (N,), for products that read k in the order of x."""
    q, scale, _ = _cast(x, reorder=False, has_sums=False)
    return q[:, : x.shape[1]], scale


@on_its_device
def _cast(x: torch.Tensor, *, reorder: bool, has_sums: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, padded to whole blocks of k, scale, and sums or no rows of sums; `reorder` puts k into `kernels.fp8.ORDER`."""
    check_matrix("x", x)
    if x.dtype == torch.float32:
        raise ValueError(f"x must be float16 or bfloat16, got {x.dtype}")
    N, K = x.shape
    padded = cdiv(K, DEPTH) * DEPTH
    q = torch.empty((N, padded), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((N,), dtype=torch.float32, device=x.device)
    sums = torch.empty((N if has_sums else 0, 2, 5, padded // DEPTH), dtype=torch.float32, device=x.device)
    if N:
        block = min(next_power_of_2(padded), _CAST_BLOCK)
        cast_rows[(N,)](
            x, q, scale, sums if has_sums else None, x.stride(0), K, REORDER=reorder, STEPS=cdiv(padded, block), BLOCK=block,
            num_warps=max(1, block // 256), **({"launch_pdl": True} if since_sm_90() else {}),
        )  # fmt: skip
    return q, scale, sums


@overload
def norm_tokens(
    x: Tensor, weight: Tensor | None, *, eps: float = 1e-6, zero_centered: bool = False, residual: None = None
) -> Fp8Tokens: ...
@overload
def norm_tokens(
    x: Tensor, weight: Tensor | None, *, eps: float = 1e-6, zero_centered: bool = False, residual: Tensor
) -> tuple[Fp8Tokens, Tensor]: ...
def norm_tokens(
    x: Tensor, weight: Tensor | None, *, eps: float = 1e-6, zero_centered: bool = False, residual: Tensor | None = None
) -> Fp8Tokens | tuple[Fp8Tokens, Tensor]:
    """Compute RMSNorm of every row of x (N, K) as `rmsnorm_fwd` does, and cast the result as `cast_tokens` does, in a launch.

    Args:
        x: (N, K) fp16 or bf16, K at most 16384; rows may be any distance apart, elements of a row must be adjacent.
        weight: (K,), of x's type or fp32; None multiplies by 1.
        eps: added to the mean of the squares, 0 or more.
        zero_centered: multiply by `weight + 1` instead.
        residual: (N, K), likewise, of x's type, added to x first.

    Returns:
        The cast tokens; with a residual the tokens and x + residual, rounded to x's type.
    """
    check_matrix("x", x)
    if x.dtype == torch.float32:
        raise ValueError(f"x must be float16 or bfloat16, got {x.dtype}")
    if not 1 <= x.shape[1] <= _NORM_BLOCK:
        raise ValueError(f"x must have 1 to {_NORM_BLOCK} columns, got {x.shape[1]}")
    if weight is not None:
        is_wide = isinstance(weight, Tensor) and weight.dtype == torch.float32
        check_like("weight", weight, (x.shape[1],), torch.float32 if is_wide else x.dtype, x.device)
    elif zero_centered:
        raise ValueError("zero_centered needs a weight, got weight=None")
    if residual is not None:
        check_matrix("residual", residual)
        check_like("residual", residual, tuple(x.shape), x.dtype, x.device)
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps=}")
    q, scale, sums, total = _norm_tokens(x, residual, weight, eps, zero_centered)
    tokens = Fp8Tokens(q, scale, sums, x.shape[1], x.dtype)
    return tokens if residual is None else (tokens, total)


@custom_op("kerneltune::norm_tokens")
@on_its_device
def _norm_tokens(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, scale and sums of `Fp8Tokens`, and x + residual; without a residual the last tensor is empty."""
    (q, scale, sums, total), (N, K) = _empty_norm(x, residual), x.shape
    if N:
        block = next_power_of_2(q.shape[1])
        norm_rows[(N,)](
            x, residual, weight, None if residual is None else total, q, scale, sums,
            x.stride(0), 0 if residual is None else residual.stride(0), K, 1 / K, eps,
            ZERO_CENTERED=zero_centered, BLOCK=block, num_warps=min(32, max(1, block // 256)),
            **({"launch_pdl": True} if since_sm_90() else {}),
        )  # fmt: skip
    return q, scale, sums, total


@_norm_tokens.register_fake
def _empty_norm(x: Tensor, residual: Tensor | None, *_others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, K = x.shape
    padded = cdiv(K, DEPTH) * DEPTH
    q, sums = x.new_empty((N, padded), dtype=torch.float8_e4m3fn), x.new_empty((N, 2, 5, padded // DEPTH), dtype=torch.float32)
    return q, x.new_empty((N,), dtype=torch.float32), sums, x.new_empty(0 if residual is None else (N, K))


def descriptors(tokens: Fp8Tokens, weight: Int4Weight, c: Any) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return what TMA copies: the tokens and the codes of a program's step.

    Args:
        c: a config with `tokens` and `blocks`.

    Raises:
        ValueError: an address that TMA cannot copy from.
    """
    q, w = tokens.q, weight.packed.view(torch.uint8)
    for name, t in (("x.q", q), ("weight.packed", w)):
        if t.data_ptr() % 16:
            raise ValueError(f"{name} must begin at a multiple of 16 bytes, got address {t.data_ptr():#x}")
    return (
        TensorDescriptor(q, list(q.shape), [q.shape[1], 1], [c.tokens, DEPTH // weight.scales.shape[3]]),
        TensorDescriptor(
            w,
            [w.shape[0], w.shape[1] * (ROWS // 2), DEPTH],
            [w.shape[1] * (ROWS // 2 * DEPTH), DEPTH, 1],
            [1, ROWS // 2 * c.blocks, DEPTH],
        ),
    )


@on_its_device
def int4_fp8_gemm(
    x: torch.Tensor | Fp8Tokens, weight: Int4Weight, bias: torch.Tensor | None = None, *, config: Int4Fp8Config | None = None
) -> torch.Tensor:
    """Return x · wᵀ + bias with weights of four bits and x cast to e4m3, fp32 inside.

    Args:
        x: (N, K) fp16 or bf16, or the result of `cast_tokens` or `norm_tokens`.
        weight: w (M, K), from `pack`, with scales and zero points of x's type.
        bias: (M,) of x's type, or None.
        config: None takes the best known config.

    Returns:
        (N, M) of x's type, contiguous. The same inputs and config give the same bits.
    """
    N, M, depth = check("int4_fp8_gemm", x, weight, bias), weight.rows, cdiv(weight.depth, DEPTH)
    y = torch.empty((N, M), dtype=x.dtype, device=weight.packed.device)
    if not N:
        return y
    c: Int4Fp8Config = gemm.look_up(_choose, N, weight, x.dtype, bias=bias is not None) if config is None else config
    steps = _steps(depth, c)
    if (c.splits - 1) * steps >= depth:
        raise ValueError(f"config={c}: {c.splits} programs along {depth} blocks of k, {c.k_blocks} to a step")
    rest = rest_of(weight, c.rest)
    tokens = tokens_of(x, rest)
    scale, scales = tokens.scale, weight.scales
    tiles, token_tiles = cdiv(M, ROWS * c.blocks), cdiv(N, c.tokens)
    words = (c.splits - 1) * tiles * token_tiles * (ROWS * c.blocks * c.tokens)  # of four bytes
    early = c.early and since_sm_90()
    with counters(cdiv(words, 2), y.device) if words else nullcontext(y) as parts:
        kernel[(c.splits, tiles, token_tiles)](
            *descriptors(tokens, weight, c), scale, tokens.sums, weight.packed.view(torch.uint8), scales,
            scales if weight.zeros is None else weight.zeros, y if bias is None else bias, y, parts,
            N, M, weight.depth, steps, int(scale.shape[0] > 1), WEIGHT=gemm.constants(weight, bias is not None),
            WORK=Fp8Work.of(
                tokens=c.tokens, blocks=c.blocks, splits=c.splits, stages=c.stages, k_blocks=c.k_blocks, rest=rest
            ),
            EARLY=early, LEAD=_LEAD, num_warps=c.warps, **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return y


def rest_of(weight: Int4Weight, rest: int) -> int:
    """Return the `rest` of a launch: zero points need one."""
    return rest or (0 if weight.zeros is None else 16)


def check(op: str, x: torch.Tensor | Fp8Tokens, weight: Int4Weight, bias: torch.Tensor | None) -> int:
    """Check the operands of an operator, and return the number of tokens.

    Raises:
        ValueError: operands that do not fit each other, or a GPU before Hopper.
    """
    tokens = x.q if isinstance(x, Fp8Tokens) else x
    if isinstance(x, Fp8Tokens):
        _check_tokens(x)
        x = torch.empty((0, x.depth), dtype=x.dtype, device=x.q.device)
    gemm.check(x, weight, bias)
    if not (INTERPRETED or since_sm_90()):
        raise ValueError(f"{op} needs an NVIDIA GPU of compute capability 9.0 or newer, x is on another: {weight.packed.device}")
    return tokens.shape[0]


def _check_tokens(x: Fp8Tokens) -> None:
    """Check cast tokens."""
    if not isinstance(x.q, torch.Tensor) or x.q.ndim != 2 or not x.q.is_contiguous():
        raise ValueError(f"x.q must be a contiguous matrix, got {x.q if not isinstance(x.q, torch.Tensor) else x.q.stride()}")
    padded = cdiv(x.depth, DEPTH) * DEPTH
    check_like("x.q", x.q, (x.q.shape[0], padded), torch.float8_e4m3fn, x.q.device)
    scales = 1 if isinstance(x.scale, torch.Tensor) and x.scale.shape == (1,) else x.q.shape[0]
    check_like("x.scale", x.scale, (scales,), torch.float32, x.q.device)
    check_like("x.sums", x.sums, (x.q.shape[0], 2, 5, padded // DEPTH), torch.float32, x.q.device)
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x.dtype must be float16 or bfloat16, got {x.dtype}")


def space(case: Case) -> Space:
    """Offer tiles of as many tokens as there are, or fewer, and enough programs for every SM."""
    return {
        "tokens": _token_tiles(case["N"]),
        "blocks": (1, 2),
        "warps": (4, 8),
        "splits": _SPLITS,
        "stages": (3, 4),
        "early": (True, False),
        "k_blocks": (1, 2, 4),
        "rest": (16, 32) if case.option("zeros") else (0, 16, 32),
    }


def _steps(depth: int, c: Int4Fp8Config) -> int:
    """Return the blocks of k of each split but the last, out of `depth` blocks."""
    return cdiv(cdiv(depth, c.splits), c.k_blocks) * c.k_blocks


def _token_tiles(tokens: int) -> tuple[int, ...]:
    """Return the rows of x that a program may have."""
    return tuple(t for t in (16, 32, 64, 128) if t < 2 * max(tokens, 9) and 4 * t >= min(tokens, 128))


def invalid(case: Case, config: Int4Fp8Config) -> str | None:
    """Say why a config cannot run, or cannot be worth running."""
    depth, c = cdiv(case["K"], DEPTH), config
    if c.tokens not in _token_tiles(case["N"]):
        return f"programs of {c.tokens} tokens where there are {case['N']}"
    if c.warps > 4 * c.blocks:
        return f"{c.warps} warps to {c.blocks} blocks of rows"
    groups = sizes_of(case)[3]
    if c.rest and groups > 1 and not case.option("zeros"):  # 3584x8192: 1.10 to 1.40 times as long (H200, 2026-11-29)
        return f"a rest for each of {groups} groups of {DEPTH} k"
    if c.rest > 16 >= groups * _steps(depth, c):
        return f"rests of {c.rest} groups where a program has {groups * _steps(depth, c)}"
    if c.k_blocks * c.tokens > 128:
        return f"steps of {c.k_blocks} blocks of k for {c.tokens} tokens"
    sums = ROWS * c.blocks * c.tokens // (32 * c.warps)
    if sums > 64:
        return f"{sums} sums to a thread, and as many of a group"
    if (c.splits - 1) * _steps(depth, c) >= depth or c.k_blocks > depth:
        return f"{c.splits} programs along {depth} blocks of k, {c.k_blocks} to a step"
    programs = c.splits * cdiv(case["M"], ROWS * c.blocks) * cdiv(case["N"], c.tokens)
    if c.splits > 1 and (sums > 32 or programs > _MOST_PROGRAMS):
        return f"{programs} programs of {sums} sums to a thread whose parts are added up"
    return too_much_shared(c.stages * c.k_blocks * DEPTH * (c.tokens + ROWS // 2 * c.blocks))


def default(case: Case) -> Int4Fp8Config:
    """Return a config for any shape: of the shortest time that `estimate` gives, or with raw codes and as many tokens.

    H200, 2026-11-30: 0.974 of the speed of the fastest known config over 92 cases, worst 0.881; see docs/untuned_shapes.md.
    """
    N, rows, depth, groups = sizes_of(case)
    zeros = bool(case.option("zeros"))
    has_two = N > _RAW and groups == 1 and not zeros
    c = shortest((N, rows, depth, groups), sms(), has_two=has_two)
    if has_two and (c.tokens, c.blocks, c.splits) == (32, 2, 1):  # raw codes: 26.1 µs, not 28.5, with 96 tokens of 10240×5120
        return replace(c, rest=32)
    if not zeros and (N > _RAW or groups > 1):
        return c
    tiles, most = rows * cdiv(N, c.tokens), _HELD_OF_RAW.get((c.tokens, zeros), 1) * sms()
    # Programs of two blocks of rows are half as many: then an SM holds all of its programs at once.
    is_wide = tiles > most and c.tokens <= (32 if zeros else 16)
    blocks, splits = (2, 1) if is_wide else (1, min(c.splits, max(1, most // tiles)))
    steps = cdiv(depth, splits)
    fits = c.tokens == 32 or (c.tokens < 128 and tiles * splits <= most)
    k_blocks = 2 if fits and steps > 1 and (splits - 1) * 2 * cdiv(steps, 2) < depth else 1
    has_room = c.tokens == 64 and tiles * splits <= 2 * sms()
    rest = 32 if 16 < steps * groups <= 32 and (c.tokens == 16 or blocks == 2 or (has_room and not zeros)) else 16
    return Int4Fp8Config(c.tokens, blocks, 4, splits, 4 if has_room else 3, True, k_blocks, rest)


def sizes_of(case: Case) -> tuple[int, int, int, int]:
    """Return the tokens, at least 1, the blocks of rows of w, the blocks of k, and the groups of k in a block."""
    group = int(case.option("group"))
    return max(case["N"], 1), cdiv(case["M"], ROWS), cdiv(case["K"], DEPTH), cdiv(DEPTH, group) if group else 1


def is_early(N: int) -> bool:
    """Return whether programs of the default begin early."""
    return N <= _EARLY


def costs(sizes: tuple[int, int, int, int], tokens: int, blocks: int, times: StepTimes) -> tuple[ShapeCost, int, float]:
    """Return the costs of programs of a shape, the programs without splits, and the µs of their reads."""
    N, rows, depth, groups = sizes
    token_tiles = -(-N // tokens)
    tiles = -(-rows // blocks) * token_tiles
    reads = reads_us(depth, rows, rows * (token_tiles - 1), tiles * tokens, times)
    return shape_cost(tokens, blocks, groups, tokens - N / token_tiles, times), tiles, reads


@lru_cache(maxsize=4096)
def shortest(sizes: tuple[int, int, int, int], sms: int, times: StepTimes = TIMES, *, has_two: bool = False) -> Int4Fp8Config:
    """Return the config of the shortest estimated time for the result of `sizes_of`, on a GPU of so many SMs.

    Beyond `_EARLY` tokens programs do not begin early: the programs of the cast take room on the SMs, and the programs of a
    launch that would fill each SM in part lie unevenly. A fourth stage is taken where k is whole and an SM needs no
    more waves of programs with it.

    has_two: whether steps of up to 64 rows of x may take two blocks of k; then one block of rows of w with 128 rows of x is as
    fast as two or faster (H200, 2026-11-29, 36 of 38 cases).
    """
    N, _, depth, _ = sizes
    offers = []
    for tokens in _token_tiles(N):
        for blocks in ((1,) if has_two and tokens == 128 else (1, 2)) if 3 * tokens >= min(N, 128) else ():
            cost, tiles, reads = costs(sizes, tokens, blocks, times)
            for k_blocks in (1, 2) if has_two and tokens < 128 < depth * DEPTH else (1,):
                share, held = (1.0, cost.held) if k_blocks == 1 else (_TWO_AT_ONCE, _HELD_OF_TWO[tokens, blocks])
                of_shape = cost._replace(held=held)
                for splits in _SPLITS if tokens < 128 else (1,):
                    programs, steps = -(-tiles * splits // sms), -(-depth // (splits * k_blocks)) * k_blocks
                    if splits == 1 or (programs <= held and (splits - 1) * steps < depth):
                        us = share * product_us(of_shape, programs, steps, reads, splits)
                        offers.append((us, tokens, blocks, splits, k_blocks, programs, held))
    _, tokens, blocks, splits, k_blocks, programs, held = min(offers)
    is_deep = splits == k_blocks == 1 and cdiv(programs, min(held, 256 // tokens)) <= cdiv(programs, held)
    return Int4Fp8Config(tokens, blocks, warps_of(tokens, blocks), splits, 4 if is_deep else 3, is_early(N), k_blocks)


def run(inputs: Inputs, config: Int4Fp8Config | None) -> Outputs:
    """Run `int4_fp8_gemm` on a case's inputs, the cast of x included."""
    return {"y": int4_fp8_gemm(inputs["x"], inputs["weight"], inputs.get("bias"), config=config)}


def run_dequantised(inputs: Inputs, _config: None) -> Outputs:
    """Run torch's product of the cast tokens with weights of 16 bits."""
    x, w = inputs["x"], inputs["forms"].dequantised
    q, scale = cast_in_order(x)
    y = torch.nn.functional.linear(q.to(x.dtype), w) * scale[:, None]
    return {"y": (y + inputs["bias"] if "bias" in inputs else y).to(x.dtype)}


def expected(inputs: Inputs) -> Outputs:
    """Return y in fp64 for x cast to e4m3 with a scale for each token, and spread as `reference.reference` has it."""
    x = inputs["x"].float()
    multiplier = (FP8_MAX["e4m3"] / x.abs().amax(1, keepdim=True).double().clamp(min=1e-12)).float()
    cast = (x * multiplier).to(torch.float8_e4m3fn).double() / multiplier.double()
    return reference.reference({**inputs, "x": cast})


def compare(case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Compare as `int4_gemm` does, within the rounding of the sums of the tensor cores, which have 13 bits, if y has more."""
    rounding = max(torch.finfo(inputs["x"].dtype).eps / 2, 2.0**-12)
    return reference.compare(case, inputs, {"rounding": rounding, **outputs}, expected)


OP = Op(
    name="int4_fp8_gemm",
    axes=("N", "M", "K"),
    dtypes=("bfloat16", "float16"),
    quants=("int4",),
    options=reference.OPTIONS,
    free_axes=("N",),  # as of `int4_gemm`
    bands={"N": (16, 32, 64, 96, 128, 256)},
    free_options=("group", "zeros", "bias"),
    unseen_options=(),
    flops=reference.flops,
    inputs=reference.inputs,
    reference=expected,
    compare=compare,
    traffic=reference.traffic,
    variants=(
        Variant("baseline", run_dequantised, unsupported=configs.unsupported),
        Variant("optimized", run, Int4Fp8Config, space, invalid, default, configs.unsupported),
    ),
    module=__name__,
)
_choose = cache.Chooser.of(OP, OP.variant("optimized"))
