"""Launch kernels in ways that few programs use: `python rare_launches.py arguments|graphs|threads|made|operators`.

arguments: options and annotations that few kernels have; graphs: in a CUDA graph, and on several streams; threads: the first
launches of several threads; made: kernels made by calls; operators: inside of torch.compile, beside torch's flex attention.
"""

import functools
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl
from measured_step import DEVICE, SMALL, leaf, run, sized

ROWS, WIDTH = sized(8192, 70), sized(2048, 64)
LIMIT: tl.constexpr = tl.constexpr(3.0)
BLOCKS = [triton.Config({"ROWS": r}, num_warps=w) for r in (1, 2, 4) for w in (2, 4, 8)]


@triton.jit(noinline=True)
def first_row(program, size):
    """Return the first row of a program, in a function of its own."""
    return program * size


@triton.jit
def add(a, b):
    """Return a sum."""
    return a + b


@triton.jit
def capped(x):
    """Return values up to a limit that the module holds."""
    return tl.minimum(tl.maximum(x, -LIMIT), LIMIT)


@triton.jit
def halved(x):
    """Return halves."""
    return x * 0.5


@triton.autotune(
    [*BLOCKS, triton.Config({"ROWS": 2}, num_warps=4, maxnreg=64)],
    key=["rows", "WIDTH"],
    reset_to_zero=["total_ptr"],
)
@triton.heuristics({"EVEN": lambda args: args["rows"] % args["ROWS"] == 0})
@triton.jit(do_not_specialize=["scale"], do_not_specialize_on_alignment=["weight_ptr"])
def summed(
    x_ptr: tl.const, weight_ptr, y_ptr, total_ptr, rows, scale: tl.float32, flag, ACT: tl.constexpr, DTYPE: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, SHIFT: tl.constexpr = 0.25,
):  # fmt: skip
    """Write rows in another type, and add up their squares over all programs."""
    row = first_row(tl.program_id(0), ROWS) + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    mask = (row >= 0)[:, None] if EVEN else (row < rows)[:, None]
    x = tl.load(x_ptr + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + column)[None, :]
    if flag:
        x = x + SHIFT
    y = ACT(x * scale)
    y = tl.where(mask, y, 0.0)
    tl.store(y_ptr + row[:, None] * WIDTH + column[None, :], y.to(DTYPE), mask=mask)
    parts = tl.reduce(y * y, 1, add)
    tl.atomic_add(total_ptr, tl.sum(parts, 0))


def arguments() -> Any:
    """Pass functions, types, None, booleans and defaults, with a weight that is not aligned."""
    x = leaf(ROWS, WIDTH).detach()
    weight = leaf(WIDTH + 1, scale=0.5, dtype=torch.float32).detach()[1:]
    found = []
    for act, given, dtype, flag in ((capped, weight, tl.float16, True), (halved, None, tl.float32, False)):
        y = torch.empty(ROWS, WIDTH, device=DEVICE, dtype=torch.float16 if dtype is tl.float16 else torch.float32)
        total = torch.zeros(1, device=DEVICE)
        grid = lambda meta: (triton.cdiv(ROWS, meta["ROWS"]), 1)  # noqa: E731  as users write it
        flag = flag if DEVICE == "cuda" else int(flag)  # the interpreter takes no booleans
        summed[grid](x, given, y, total, ROWS, 0.5, flag, ACT=act, DTYPE=dtype, WIDTH=WIDTH)
        found += [y, total]
    return found


@triton.autotune(BLOCKS, key=["rows"])
@triton.jit
def normed(x_ptr, y_ptr, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Divide each row by its root mean square."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = tl.load(x_ptr + at, mask=row[:, None] < rows, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + 1e-6)[:, None]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=row[:, None] < rows)


def norm(x: torch.Tensor) -> torch.Tensor:
    """Return rows divided by their root mean square."""
    y = torch.empty_like(x)
    normed[lambda meta: (triton.cdiv(len(x), meta["ROWS"]),)](x, y, len(x), WIDTH=x.shape[1])
    return y


@functools.cache
def graph(x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Return a CUDA graph of two norms and its result; the first launch is the graph's warm-up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        norm(norm(x) + x)
    torch.cuda.current_stream().wait_stream(side)
    held = torch.cuda.CUDAGraph()
    with torch.cuda.graph(held):
        out = norm(norm(x) + x)
    return held, out


@functools.cache
def rows_of(rows: int) -> torch.Tensor:
    """Return rows that live as long as the program."""
    return leaf(rows, WIDTH).detach()


def graphs() -> Any:
    """Replay a graph, and launch on two streams."""
    if DEVICE != "cuda":
        return [norm(norm(rows_of(ROWS)) + rows_of(ROWS)), norm(rows_of(ROWS // 2))]
    held, out = graph(rows_of(ROWS))
    held.replay()
    found = [out.clone()]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for number, stream in enumerate(streams):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(norm(rows_of(ROWS // (number + 1))))
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    return found


def threads() -> Any:
    """Launch from eight threads, two of them of each size."""
    sizes = [ROWS // (number // 2 + 1) for number in range(8)]
    inputs = [rows_of(size) for size in sizes]
    with ThreadPoolExecutor(1 if SMALL else 8) as pool:
        found = list(pool.map(norm, inputs))
    return found


SCALED = """
@triton.jit
def scaled(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n).to(tl.float32) * factor
    tl.store(y_ptr + at, x.to(y_ptr.dtype.element_ty), mask=at < n)
"""


@functools.cache
def from_text() -> Any:
    """Return a kernel whose source is no file's but linecache's, as of a cell of a notebook.

    No kernel of a text or of a function can be served: with several configs each would be timed at run time.
    """
    import linecache

    name = "<cell 1>"
    linecache.cache[name] = (len(SCALED), None, SCALED.splitlines(keepends=True), name)
    space = {"triton": triton, "tl": tl, "__name__": "__main__"}
    exec(compile(SCALED, name, "exec"), space)
    return triton.autotune([triton.Config({"BLOCK": 1024})], key=["n"])(space["scaled"])


@functools.cache
def made_norm(width: int) -> Any:
    """Return a launcher that knows its width."""

    @triton.autotune(BLOCKS[:1], key=["rows"])
    @triton.jit
    def inner(x_ptr, y_ptr, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        x = tl.load(x_ptr + at, mask=row[:, None] < rows, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, (x + 1).to(y_ptr.dtype.element_ty), mask=row[:, None] < rows)

    return lambda grid: functools.partial(inner[grid], WIDTH=width)


LAUNCH = functools.partial(normed.run, warmup=False, WIDTH=WIDTH)
"""A launch with an argument given ahead, whose grid is a keyword."""


def made() -> Any:
    """Launch a kernel of a text, of a function, by a partial, and by an entry of a dictionary."""
    x = rows_of(ROWS)
    outs = [torch.empty_like(x) for _ in range(4)]
    grid = lambda meta: (triton.cdiv(ROWS, meta["ROWS"]),)  # noqa: E731  as users write it
    from_text()[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, outs[0], x.numel(), 0.5)
    made_norm(WIDTH)(grid)(x, outs[1], ROWS)
    LAUNCH(x, outs[2], ROWS, grid=grid)
    {"norm": normed}["norm"][grid](*(x, outs[3]), **{"rows": ROWS, "WIDTH": WIDTH})
    return outs


@torch.library.triton_op("rare_launches::norm", mutates_args={})
def norm_op(x: torch.Tensor) -> torch.Tensor:
    """Return rows divided by their root mean square."""
    y = torch.empty_like(x)
    torch.library.wrap_triton(normed)[lambda meta: (triton.cdiv(len(x), meta["ROWS"]),)](x, y, len(x), WIDTH=x.shape[1])
    return y


@torch.library.custom_op("rare_launches::opaque_norm", mutates_args=())
def opaque_norm(x: torch.Tensor) -> torch.Tensor:
    """Return rows divided by their root mean square, in code that no compiler reads."""
    return norm(x)


opaque_norm.register_fake(torch.empty_like)


def compiled(x: torch.Tensor, mask: Any) -> torch.Tensor:
    """Attend to earlier rows of normalised heads."""
    from torch.nn.attention.flex_attention import flex_attention

    length, heads = len(x), x.shape[1] // 64
    q = (opaque_norm(x) if SMALL else norm_op(x)).reshape(1, length, heads, 64).transpose(1, 2)
    out = flex_attention(q, q, opaque_norm(x).reshape(1, length, heads, 64).transpose(1, 2), block_mask=mask)
    return torch.nn.functional.silu(out.transpose(1, 2).reshape(length, -1)) + x


@functools.cache
def mask_of(length: int) -> Any:
    """Return the mask of a causal layer."""
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=DEVICE)


@functools.cache
def compiled_once() -> Any:
    """Return the function, compiled where there is a GPU."""
    return compiled if SMALL else torch.compile(compiled)


def operators() -> Any:
    """Run the compiled function at two lengths, the second of which may compile for any length."""
    return [compiled_once()(rows_of(length), mask_of(length)) for length in (sized(2048, 64), sized(1024, 32))]


STEPS = {"arguments": arguments, "graphs": graphs, "threads": threads, "made": made, "operators": operators}

if __name__ == "__main__":
    run(STEPS[sys.argv[1]])
