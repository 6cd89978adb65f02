"""An operator that sums rows, with a mistake at the sizes of its bench cases, and the kernels that it launches."""

from functools import partial

import torch
import triton
import triton.language as tl
from mistaken_ops import case_of, rows_of

from kerneltune.checking.check import Checker
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant

BENCH = [case_of("long", 4096, 3000), case_of("short", 8192, 64)]


@triton.jit
def _doubled_if_long(total, size):
    if size > 2048:
        total *= 2
    return total


@triton.jit
def sums_of_rows(x_ptr, y_ptr, N, BLOCK: tl.constexpr, IS_LONG: tl.constexpr, MISTAKE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    at = tl.arange(0, BLOCK)
    total = tl.load(x_ptr + row + at, at < N, other=0.0)
    if MISTAKE != "block below every row":
        for begin in range(BLOCK, 2048 if MISTAKE == "loop cut short" else N, BLOCK):
            total += tl.load(x_ptr + row + begin + at, begin + at < N, other=0.0)
    tiles = tl.cdiv(N, BLOCK)
    if tiles > 2 and MISTAKE == "branch on a count of tiles":
        total *= 2
    if N > 2048 and MISTAKE == "branch on a size":
        total *= 2
    if MISTAKE == "branch of a device function":
        total = _doubled_if_long(total, N)
    if IS_LONG and MISTAKE == "flag":
        total *= 2
    tl.store(y_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _sums_of_long_rows(x_ptr, y_ptr, N):
    total = 0.0
    for begin in range(0, N - 64, 64):
        total += tl.sum(tl.load(x_ptr + tl.program_id(0).to(tl.int64) * N + begin + tl.arange(0, 64)), 0)
    tl.store(y_ptr + tl.program_id(0), total)


def sums(mistake: str, inputs: Inputs, _config: None) -> Outputs:
    x = inputs["x"]
    M, N = x.shape
    y = x.new_empty(M)
    if N > 2048 and mistake == "kernel of long rows":
        _sums_of_long_rows[(M,)](x, y, N)
    else:
        block = min(triton.next_power_of_2(N), 1024)
        if N > 2048 and mistake == "branch of host code":
            x = 2 * x
        rows = M - (M > 4096 and mistake == "grid cut short")
        sums_of_rows[(rows,)](x, y, N, BLOCK=block, IS_LONG=N > 2048 and mistake == "flag", MISTAKE=mistake)
    return {"y": y}


def summing(mistake: str, elements: int = 1) -> Op:
    """Return an operator with a mistake; `elements` is its traffic of an element, in bytes."""
    variant = Variant("optimized", partial(sums, mistake))
    traffic = lambda case: Traffic(elements * case["M"] * case["N"], 0)  # noqa: E731
    compare = lambda case, inputs, outputs, expected: (  # noqa: E731
        [] if torch.allclose(outputs["y"], expected["y"], 1e-3, 1e-1) else ["y: wrong"]
    )
    return Op(
        name="summed", axes=("M", "N"), dtypes=("float32",), inputs=rows_of, reference=lambda inputs: {"y": inputs["x"].sum(1)},
        compare=compare, traffic=traffic, variants=(variant,), module=__name__,
    )  # fmt: skip


def findings(op: Op, cases: list[Case]) -> list[str]:
    variant = op.variants[0]
    return [line for case in cases for line in Checker(op, case, "cpu").run(variant, variant.default_config(case))[1]]
