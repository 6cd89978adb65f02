"""Measure the host's time of a launch: by triton.autotune on a hit, served, captured; the kernel's own launch is stubbed.

`python host_cost.py [TENSORS [WHOLE_NUMBERS [CONFIGS]]]`, 10, 20 and 48 if not given, needs no GPU. It prints microseconds beyond
a bare launch: of a launch that was seen before, and of a launch whose whole number was never seen. The number is no part of the
author's key. It either has no part in the choice, or it decides between 16 rows of the table. The last row is a launch of a
kernel without an autotuner, whose whole key the table has.
"""

import importlib
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from kerneltune.adopt import startup
from kerneltune.adopt.folder import KernelCode
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.table import Group, ServingRow, ServingTable, TableKernel, write_table

ROWS = 16


def made_kernel(folder: Path, tensors: int, numbers: int, configs: int) -> Any:
    """Return an autotuned kernel with so many arguments and configs, whose launch does nothing."""
    names = [*(f"p{n}" for n in range(tensors)), *(f"n{n}" for n in range(numbers))]
    sys.modules.pop("stub_of_many", None)
    head = f"def stub({', '.join(names)}, BLOCK: tl.constexpr):"
    source = f"import triton\nimport triton.language as tl\n\n\n@triton.jit\n{head}\n    pass\n"
    (folder / "stub_of_many.py").write_text(source)
    sys.path.insert(0, str(folder))
    listed = [triton.Config({"BLOCK": 16 * (n + 1)}, num_warps=4) for n in range(configs)]
    decorate = triton.autotune(listed, ["n0", "n1"], do_bench=lambda call, quantiles: [1.0, 1.0, 1.0])
    kernel = decorate(importlib.import_module("stub_of_many").stub)
    kernel.fn.run = lambda *args, **kwargs: None
    return kernel


def write_rows(folder: Path, rows: int) -> None:
    """Write the table that serves the captured launch: with so many rows, between which the last whole number decides."""
    launch = read_capture(folder).classes[0]
    configs = [one.config for one in launch.candidates]
    name = list(launch.sizes)[-1]
    served = tuple(
        ServingRow({**launch.sizes, name: 2**n}, (configs[-1 - n % len(configs)], *configs[:3]), {}) for n in range(rows)
    )
    group = Group(launch.key_values, launch.dtypes, (name,) if rows > 1 else (), served)
    of, code = launch.kernel, {name: getattr(launch, name) for name in KernelCode.__struct_fields__}
    write_table(folder, ServingTable(launch.device, {}, (TableKernel(of.module, of.name, "", (group,), (), **code),)))


def cost_us(launch: Callable[[], Any], series: int = 60, times: int = 60) -> float:
    """Return the least processor time of a launch in microseconds, which other programs lengthen little."""
    least = float("inf")
    for _ in range(series):
        began = time.thread_time()
        for _ in range(times):
            launch()
        least = min(least, time.thread_time() - began)
    return least / times * 1e6


def costs(tensors: int, numbers: int, configs: int) -> dict[str, float]:
    """Return microseconds beyond a bare launch by way of launching, each the least of five."""
    folder = Path(tempfile.mkdtemp())
    kernel = made_kernel(folder, tensors, numbers, configs)
    args = [*(torch.empty(4, 8, 16) for _ in range(tensors)), *range(numbers)]
    new = itertools.count(1000)

    def launch() -> Any:
        return kernel[lambda meta: (1,)](*args)

    def launch_new() -> Any:
        return kernel[lambda meta: (1,)](*args[:-1], next(new))

    startup.capture(folder)
    launch()
    startup.uninstall()
    best: dict[str, float] = {}

    def measure(name: str, one: Callable[[], Any]) -> None:
        best[name] = min(best.get(name, 1e9), cost_us(one))

    for _ in range(5):  # in turn, because other programs make the host slower at times
        measure("bare", lambda: kernel.fn.run(*args, grid=(1,), warmup=False, BLOCK=64, num_warps=4, num_ctas=1, num_stages=3))
        measure("triton.autotune", launch)
        startup.capture(folder)
        measure("captured", launch)
        startup.uninstall()
        for rows, kind in ((1, "served"), (ROWS, "served by size")):
            write_rows(folder, rows)
            startup.install(folder, miss="error")
            measure(kind, launch)
            measure(f"{kind}, a new number", launch_new)
            assert startup.server().misses == 0
            startup.uninstall()
    bare = best.pop("bare")
    return {name: value - bare for name, value in best.items()}


def plain_cost(tensors: int, numbers: int) -> float:
    """Return microseconds that serving adds to a launch of a kernel without an autotuner, the least of five."""
    folder = Path(tempfile.mkdtemp())
    kernel = made_kernel(folder, tensors, numbers, 1).fn
    del kernel.run  # the kernel's own method again
    args = [*(torch.empty(4, 8, 16) for _ in range(tensors)), *range(numbers)]
    InterpretedFunction.run = lambda *args, **kwargs: None
    startup.capture(folder, plain=True)
    launch = kernel[(1,)]
    launch(*args, BLOCK=64)
    startup.uninstall()
    captured = read_capture(folder).classes[0]
    row = ServingRow(captured.sizes, tuple(one.config for one in captured.candidates[-1:]), {})
    group = Group(captured.key_values, captured.dtypes, (), (row,))
    of, code = captured.kernel, {name: getattr(captured, name) for name in KernelCode.__struct_fields__}
    kernels = (TableKernel(of.module, of.name, "", (group,), (), **code),)
    write_table(folder, ServingTable(captured.device, {}, kernels))
    best: dict[bool, float] = {}
    for is_served in (False, True) * 5:
        if is_served:
            startup.install(folder, misses=None)
        best[is_served] = min(best.get(is_served, 1e9), cost_us(lambda: launch(*args, BLOCK=64)))
        if is_served:
            counted = startup.server().counters.by_name()
            assert not any(count for name, count in counted.items() if name.startswith("missed"))
        startup.uninstall()
    return best[True] - best[False]


def main(tensors: int = 10, numbers: int = 20, configs: int = 48) -> None:
    """Measure and print."""
    print(f"{tensors + numbers} arguments, {configs} configs, µs beyond a bare launch:")
    for name, value in costs(tensors, numbers, configs).items():
        print(f"  {name:30} {value:6.1f}")
    print(f"  {'served, no autotuner':30} {plain_cost(tensors, numbers):6.1f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
