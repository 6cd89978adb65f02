"""Run kernels in the forms of Triton's tutorials: `python tutorials.py softmax|norm|attention|persistent|operator`.

softmax: compiled ahead by `warmup`, a grid as large as the GPU; norm: partial sums behind locks; attention: configs pruned by
the arguments, descriptors whose blocks a hook sets; persistent: a product with a loop over tiles; operator: a kernel inside of a
custom operator.
"""

import sys
from typing import Any

import torch
import triton
import triton.language as tl
from measured_step import BF16, DEVICE, leaf, run, sized
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def softmax_kernel(out_ptr, x_ptr, x_stride, out_stride, n_rows, n_cols, BLOCK: tl.constexpr, num_stages: tl.constexpr):
    """Write softmax of rows that lie a grid apart."""
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=num_stages):
        columns = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < n_cols, other=-float("inf"))
        exps = tl.exp(x - tl.max(x, axis=0))
        tl.store(out_ptr + row * out_stride + columns, exps / tl.sum(exps, axis=0), mask=columns < n_cols)


def softmax() -> Any:
    """Take softmax by a compiled kernel where there is a GPU, as the tutorial does, and by the kernel of the function."""
    x = leaf(sized(4096, 6), sized(3001, 50), dtype=torch.float32).detach()
    rows, columns = x.shape
    outs = [torch.empty_like(x) for _ in range(2)]
    block = triton.next_power_of_2(columns)
    programs = min(rows, sized(512, 4))
    if DEVICE == "cuda":
        args = (outs[0], x, x.stride(0), outs[0].stride(0), rows, columns)
        compiled = softmax_kernel.warmup(*args, BLOCK=block, num_stages=4, num_warps=8, grid=(1,))
        compiled._init_handles()
        compiled[(programs, 1, 1)](*args, block, 4)
    else:
        outs[0].copy_(x.softmax(1))
    softmax_kernel[(programs, 1, 1)](outs[1], x, x.stride(0), outs[1].stride(0), rows, columns, block, 2, num_warps=8)
    return outs


@triton.jit
def norm_forward(x_ptr, y_ptr, w_ptr, rstd_ptr, stride, n, eps, BLOCK: tl.constexpr):
    """Write RMS-normalised rows, of any width."""
    row = tl.program_id(0)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * stride + columns, mask=columns < n, other=0.0).to(tl.float32)
        squares += x * x
    rstd = 1 / tl.sqrt(tl.sum(squares, axis=0) / n + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, n, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < n
        x = tl.load(x_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * stride + columns, (x * rstd * w).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_backward(dx_ptr, dy_ptr, dw_ptr, x_ptr, w_ptr, rstd_ptr, lock_ptr, stride, n, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Write the gradient of a row, and add its part of the weight's gradient behind a lock."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < n
    group = row % GROUP
    lock, count = lock_ptr + group, lock_ptr + GROUP + group
    x = tl.load(x_ptr + row * stride + columns, mask=mask, other=0).to(tl.float32)
    dy = tl.load(dy_ptr + row * stride + columns, mask=mask, other=0).to(tl.float32)
    w = tl.load(w_ptr + columns, mask=mask, other=0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row)
    hat, wdy = x * rstd, w * dy
    dx = (wdy - hat * (tl.sum(hat * wdy, axis=0) / n)) * rstd
    tl.store(dx_ptr + row * stride + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    part = dy * hat
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    if tl.load(count) == 0:
        tl.atomic_xchg(count, 1)
    else:
        part += tl.load(dw_ptr + group * n + columns, mask=mask, other=0.0)
    tl.store(dw_ptr + group * n + columns, part, mask=mask)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def norm() -> Any:
    """Normalise rows, and return the gradients of rows and weight."""
    rows, n, group = sized(4096, 8), sized(4000, 60), sized(96, 4)
    x, w = leaf(rows, n).detach(), leaf(n).detach()
    dy, y, dx = leaf(rows, n, scale=0.1).detach(), torch.empty_like(x), torch.empty_like(x)
    rstd, locks = torch.empty(rows, device=DEVICE), torch.zeros(2 * group, dtype=torch.int32, device=DEVICE)
    dw = torch.zeros(group, n, device=DEVICE)
    norm_forward[(rows,)](x, y, w, rstd, x.stride(0), n, 1e-5, BLOCK=sized(1024, 32), num_warps=8)
    norm_backward[(rows,)](
        dx, dy, dw, x, w, rstd, locks, x.stride(0), n, GROUP=group, BLOCK=triton.next_power_of_2(n), num_warps=8, num_ctas=1
    )
    return [y, dx, dw.sum(0)]


def set_blocks(arguments: dict[str, Any]) -> None:
    """Set the blocks of an attention's descriptors to those of a config."""
    if isinstance(arguments["q_desc"], TensorDescriptor):
        arguments["q_desc"].block_shape = [arguments["BM"], arguments["WIDTH"]]
        arguments["k_desc"].block_shape = [arguments["BN"], arguments["WIDTH"]]
        arguments["v_desc"].block_shape = [arguments["BN"], arguments["WIDTH"]]
        arguments["o_desc"].block_shape = [arguments["BM"], arguments["WIDTH"]]


def fitting(configs: list[triton.Config], named: dict[str, Any], **kwargs: Any) -> list[triton.Config]:
    """Keep configs whose blocks divide the length."""
    return [c for c in configs if named["length"] % c.kwargs["BM"] == 0 and c.kwargs["BM"] >= c.kwargs["BN"]]


ATTENTION = [
    triton.Config({"BM": m, "BN": n}, num_stages=s, num_warps=w, pre_hook=set_blocks)
    for m in (sized(64, 32), sized(128, 64)) for n in (sized(32, 16), sized(64, 32), sized(128, 64))
    for s in (2, 3) for w in (4, 8)
]  # fmt: skip


@triton.jit
def over_keys(acc, l_i, m_i, q, k_desc, v_desc, first, start, stop, offsets, scale, BN: tl.constexpr, MASKED: tl.constexpr):
    """Attend to the blocks of keys from start to stop."""
    for at in tl.range(start, stop, BN):
        qk = tl.dot(q, k_desc.load([first + at, 0]).T) * scale
        if MASKED:
            qk = tl.where(offsets[:, None] >= at + tl.arange(0, BN)[None, :], qk, -1.0e6)
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        p = tl.math.exp2(qk - m_new[:, None])
        alpha = tl.math.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(tl.bfloat16), v_desc.load([first + at, 0]), acc * alpha[:, None])
        m_i = m_new
    return acc, l_i, m_i


@triton.autotune(ATTENTION, key=["length", "WIDTH"], prune_configs_by={"early_config_prune": fitting})
@triton.jit
def attention_kernel(
    scale, m_ptr, heads, q_desc, k_desc, v_desc, o_desc, length, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Attend causally: the blocks below the diagonal, then those on it."""
    tl.static_assert(BN <= WIDTH * 4)
    block, head = tl.program_id(0), tl.program_id(1)
    first = head * length
    offsets = block * BM + tl.arange(0, BM)
    m_i = tl.full([BM], -float("inf"), tl.float32)
    l_i = tl.full([BM], 0.0, tl.float32)
    acc = tl.zeros([BM, WIDTH], tl.float32)
    q = q_desc.load([first + block * BM, 0])
    scale = scale * 1.44269504
    acc, l_i, m_i = over_keys(acc, l_i, m_i, q, k_desc, v_desc, first, 0, block * BM, offsets, scale, BN, False)
    acc, l_i, m_i = over_keys(acc, l_i, m_i, q, k_desc, v_desc, first, block * BM, (block + 1) * BM, offsets, scale, BN, True)
    tl.store(m_ptr + first + offsets, m_i + tl.math.log2(l_i))
    o_desc.store([first + block * BM, 0], (acc / l_i[:, None]).to(tl.bfloat16))


def attention() -> Any:
    """Attend in heads of one batch."""
    heads, length, width = sized(32, 2), sized(2048, 128), sized(64, 32)
    q, k, v = (leaf(heads * length, width, scale=s).detach() for s in (1.0, 0.5, 0.7))
    o, m = torch.empty_like(q), torch.empty(heads * length, device=DEVICE)
    described = [TensorDescriptor(t, t.shape, [width, 1], [1, 1]) for t in (q, k, v, o)]
    attention_kernel[lambda meta: (triton.cdiv(length, meta["BM"]), heads)](0.125, m, heads, *described, length, WIDTH=width)
    return [o, m]


def named(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Return the name and work of a product for a profiler."""
    return {"name": f"{kernel.name} [{args['M']}]", "flops16": 2.0 * args["M"] * args["N"] * args["K"]}


PRODUCT = [
    triton.Config({"BM": m, "BN": n, "BK": sized(64, 16), "GROUP": 8}, num_stages=s, num_warps=w)
    for m in (sized(64, 32), sized(128, 64)) for n in (sized(128, 32), sized(256, 64)) for s in (3, 4) for w in (4, 8)
]  # fmt: skip


@triton.jit
def place(tile, in_group, m_tiles, GROUP: tl.constexpr):
    """Return the place of a tile whose neighbours share rows."""
    group = tile // in_group
    first = group * GROUP
    size = min(m_tiles - first, GROUP)
    return first + (tile % size), (tile % in_group) // size


@triton.autotune(PRODUCT, key=["M", "N", "K"])
@triton.jit(launch_metadata=named, do_not_specialize=["M"])
def persistent_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    bias_ptr,
    M,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SMS: tl.constexpr,
):
    """Multiply A (M, K) by B (K, N), tile after tile; the bias may be None."""
    m_tiles, n_tiles, k_tiles = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, SMS, flatten=True):
        row, column = place(tile, GROUP * n_tiles, m_tiles, GROUP)
        rows, columns = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
        a_rows = tl.max_contiguous(tl.multiple_of(tl.where(rows < M, rows, 0), BM), BM)
        b_columns = tl.max_contiguous(tl.multiple_of(tl.where(columns < N, columns, 0), BN), BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for ki in range(k_tiles):
            inner = ki * BK + tl.arange(0, BK)
            a = tl.load(a_ptr + a_rows[:, None] * K + inner[None, :], mask=inner[None, :] < K, other=0.0)
            b = tl.load(b_ptr + inner[:, None] * N + b_columns[None, :], mask=inner[:, None] < K, other=0.0)
            acc = tl.dot(a, b, acc)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + columns, mask=columns < N, other=0.0)[None, :]
        mask = (rows[:, None] < M) & (columns[None, :] < N)
        tl.store(c_ptr + rows[:, None] * N + columns[None, :], acc.to(tl.bfloat16), mask=mask)


def persistent() -> Any:
    """Multiply with and without a bias."""
    m, n, k, sms = sized(3000, 70), sized(4096, 64), sized(2048, 48), sized(132, 3)
    a, b, bias = leaf(m, k).detach(), leaf(k, n, scale=0.1).detach(), leaf(n).detach()
    outs = []
    for added in (None, bias):
        outs.append(torch.empty(m, n, device=DEVICE, dtype=BF16))
        persistent_kernel[lambda meta: (min(sms, triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"])),)](
            a, b, outs[-1], added, m, n, k, SMS=sms
        )
    return outs


@triton.autotune(
    [triton.Config({"BLOCK": b}, num_warps=w) for b in (512, 1024, 4096) for w in (4, 8)], key=["n"], restore_value=["x_ptr"]
)
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def scaled_add(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Add a multiple of y to x, in place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = None if EVEN else at < n
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=mask) + factor * tl.load(y_ptr + at, mask=mask), mask=mask)


@torch.library.triton_op("tutorials::scaled_add", mutates_args={"x"})
def scaled_add_op(x: torch.Tensor, y: torch.Tensor, factor: float) -> None:
    """Add a multiple of y to x, in place."""
    n = x.numel()
    torch.library.wrap_triton(scaled_add)[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n, factor)


def operator() -> Any:
    """Run the custom operator, eager and in a gradient."""
    x, y = leaf(sized(1 << 22, 4096)).detach(), leaf(sized(1 << 22, 4096)).detach()
    z = x[: sized(3_000_001, 3001)].clone()
    scaled_add_op(x, y, 0.5)
    scaled_add_op(z, y[: z.numel()], 2.0)
    return [x, z]


STEPS = {"softmax": softmax, "norm": norm, "attention": attention, "persistent": persistent, "operator": operator}

if __name__ == "__main__":
    run(STEPS[sys.argv[1]])
