"""An operator whose kernel faults, hangs or asks for too much memory when its config says so; for GPU tests."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kerneltune.spec import Case, Op, Space, Traffic, Variant

N = 1 << 16


@dataclass(frozen=True, slots=True)
class Knobs:
    """does: `fine`, `fault`, `hang` or `memory`."""

    does: str


@triton.jit
def _copy(x_ptr, y_ptr, flag_ptr, offset, SPIN: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if SPIN:
        while tl.atomic_add(flag_ptr, 0) == 0:  # nobody raises the flag
            pass
    tl.store(y_ptr + at + offset, tl.load(x_ptr + at))


def run(inputs: Mapping[str, Any], config: Knobs) -> dict[str, Any]:
    """Copy x, or fail as the config names."""
    x = inputs["x"]
    if config.does == "memory":
        return {"y": torch.empty((1 << 50,), dtype=torch.float32, device=x.device)}
    y, flag = torch.empty_like(x), torch.zeros((1,), dtype=torch.int32, device=x.device)
    _copy[(N // 1024,)](x, y, flag, (1 << 44) if config.does == "fault" else 0, SPIN=config.does == "hang", BLOCK=1024)
    return {"y": y}


def inputs(_case: Case, *, device: str, seed: int = 0) -> dict[str, Any]:
    """Make x (65536,) fp32, whatever the case says."""
    x = torch.empty((N,), device=device)
    return {"x": x if device == "meta" else x.normal_(generator=torch.Generator(device).manual_seed(seed))}


def reference(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return x."""
    return {"y": values["x"]}


def compare(_case: Case, _inputs: Any, outputs: Any, expected: Any) -> list[str]:
    """Compare bit by bit."""
    return [] if torch.equal(outputs["y"], expected["y"]) else ["y: not x"]


def space(_case: Case) -> Space:
    """Return a config for each thing that a kernel may do."""
    return {"does": ("fine", "fault", "hang", "memory")}


CASE = Case("broken", (("N", N),), "float32")
VARIANT = Variant("optimized", run, Knobs, space, default=lambda _case: Knobs("fine"))
FAULTY = Variant("faulty", run, Knobs, space, default=lambda _case: Knobs("fault"))
_VARIANTS = (VARIANT, FAULTY)
OPS = (Op("broken", ("N",), ("float32",), inputs, reference, compare, lambda _: Traffic(4 * N, 4 * N), _VARIANTS, __name__),)
