"""Thirteen kernels with a mistake that Triton users make, each beside an operator that finds it: y = x * 2 in bf16, x padded."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from kerneltune.kernel_lib.agreement import close
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant

PAD = 8
"""Elements between the rows of x."""


@triton.jit
def _mistaken(x_ptr, y_ptr, sum_ptr, M, N, stride, MISTAKE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    x_row = x_ptr + row.to(tl.int64) * stride
    y_at = y_ptr + row.to(tl.int64) * N + col
    mask = col < N
    if MISTAKE == "off_by_one_mask":
        mask = col <= N
    if MISTAKE == "wrong_stride":
        x_row = x_ptr + row * N
    if MISTAKE == "int32_overflow":
        x_row = x_ptr + row * stride
    if MISTAKE == "swapped_axes":
        y_at = y_ptr + col.to(tl.int64) * N + row
    if MISTAKE == "out_of_bounds_read":
        x_row += stride
    if MISTAKE == "missing_mask":
        x = tl.load(x_row + col).to(tl.float32)
    else:
        x = tl.load(x_row + col, mask=col < N, other=0.0).to(tl.float32)
    if MISTAKE == "wrong_cast":
        x = x.to(tl.float8e5).to(tl.float32)
    if MISTAKE == "nan_policy":
        x = tl.maximum(x, -3.0e38)
    if MISTAKE == "config_dependent":
        mask = col < min(N, 64)
    y = x * (3.0 if MISTAKE == "wrong_scale" else 2.0)
    if MISTAKE == "unwritten_tail":
        mask = col < N - 1
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=mask)
    if MISTAKE == "overwritten_input":
        tl.store(x_row + col, y.to(x_ptr.dtype.element_ty), mask=mask)
    tl.atomic_add(sum_ptr, 1.0)


MISTAKES = (
    "off_by_one_mask", "missing_mask", "wrong_stride", "wrong_cast", "unwritten_tail", "int32_overflow", "swapped_axes",
    "wrong_scale", "nan_policy", "atomics_without_reset", "config_dependent", "out_of_bounds_read",
    "overwritten_input",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Knobs:
    """block: elements of a row per program; clamp: whether only 64 of them are stored."""

    block: int
    clamp: bool = False


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    M, N = case["M"], case["N"]
    x = torch.empty((M, N + PAD), dtype=torch.bfloat16, device=device)
    if device != "meta":
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        x[0, 0] = float("nan")
    return {"x": x[:, :N]}


def reference(values: Inputs) -> Outputs:
    return {"y": values["x"].float() * 2, "rows": torch.tensor([float(values["x"].shape[0])])}


def compare(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    return [line for name, want in expected.items() for line in close(name, outputs[name], want, 1e-2, 0.0)]


def space(_case: Case) -> dict[str, tuple[object, ...]]:
    return {"block": (128, 256), "clamp": (False, True)}


def _run(mistake: str, sums: dict[str, torch.Tensor], values: Inputs, config: Knobs) -> Outputs:
    x = values["x"]
    M, N = x.shape
    if x.stride(1) != 1:
        raise ValueError("elements of a row must be adjacent")
    y = torch.empty((M, N), dtype=x.dtype, device=x.device)
    rows = torch.zeros(1, device=x.device)
    if mistake == "atomics_without_reset":
        rows = sums.setdefault(str(x.device), rows)
    if mistake == "config_dependent" and not config.clamp:
        mistake = ""
    _mistaken[(M,)](x, y, rows, M, N, x.stride(0), MISTAKE=mistake, BLOCK=config.block)
    return {"y": y, "rows": rows.clone()}


def op_with(mistake: str) -> Op:
    """Return an operator whose only variant makes the mistake; none makes none."""
    run: Callable[[Inputs, Knobs], Outputs] = partial(_run, mistake, {})
    variant = Variant("optimized", run, Knobs, space, default=lambda _case: Knobs(128))
    return Op(
        name="double", axes=("M", "N"), dtypes=("bfloat16",), inputs=inputs, reference=reference, compare=compare,
        traffic=lambda case: Traffic(2 * case["M"] * case["N"], 2 * case["M"] * case["N"]), variants=(variant,), module=__name__,
    )  # fmt: skip
