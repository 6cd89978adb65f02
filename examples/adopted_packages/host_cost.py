"""Host time of one launch: triton.autotune on a hit, served, captured; the kernel's own launch is stubbed. Needs no GPU.

`python host_cost.py [TENSORS [WHOLE_NUMBERS]]`, 10 and 20 if not given, prints microseconds beyond a bare launch.
"""

import importlib
import json
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

from kerneltune.adopt import startup
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.table import MANIFEST, Group, ServingRow, ServingTable, TableKernel, digest_of, path_of, text_of


def made_kernel(folder: Path, tensors: int, numbers: int) -> Any:
    """Return an autotuned kernel with so many arguments, whose launch does nothing."""
    names = [*(f"p{n}" for n in range(tensors)), *(f"n{n}" for n in range(numbers))]
    head = f"def stub({', '.join(names)}, BLOCK: tl.constexpr):"
    source = f"import triton\nimport triton.language as tl\n\n\n@triton.jit\n{head}\n    pass\n"
    (folder / "stub_of_many.py").write_text(source)
    sys.path.insert(0, str(folder))
    configs = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (64, 128) for warps in (4, 8)]
    decorate = triton.autotune(configs, ["n0", "n1"], do_bench=lambda call, quantiles: [1.0, 1.0, 1.0])
    kernel = decorate(importlib.import_module("stub_of_many").stub)
    kernel.fn.run = lambda *args, **kwargs: None
    return kernel


def table_of(folder: Path) -> None:
    """Write the table that serves the captured launch with the author's last config."""
    launch = read_capture(folder).classes[0]
    configs = tuple(one.config for one in launch.candidates if one.is_author)[::-1]
    group = Group(launch.key, launch.dtypes, (), (ServingRow(launch.sizes, configs, {}),))
    name = launch.kernel
    kernel = TableKernel(
        name.module, name.name, launch.source, launch.bytecode, launch.configs, "", launch.keys, (group,), configs[:1]
    )
    text = text_of(ServingTable(launch.device, {}, (kernel,)))
    path = path_of(folder, launch.device)
    path.parent.mkdir()
    path.write_text(text)
    (path.parent / MANIFEST).write_text(json.dumps({"tables": {path.name: digest_of(text)}}))


def cost_us(launch: Callable[[], Any], times: int = 1000) -> float:
    """Return the least host time of one launch in microseconds, of three series."""
    series = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(times):
            launch()
        series.append((time.perf_counter() - began) / times * 1e6)
    return min(series)


def main(tensors: int = 10, numbers: int = 20) -> None:
    """Measure and print."""
    folder = Path(tempfile.mkdtemp())
    kernel = made_kernel(folder, tensors, numbers)
    args = [*(torch.empty(4, 8, 16) for _ in range(tensors)), *range(numbers)]

    def launch() -> Any:
        return kernel[lambda meta: (1,)](*args)

    startup.capture(folder)
    launch()
    startup.uninstall()
    table_of(folder)
    best = {"bare": 1e9, "triton.autotune": 1e9, "served": 1e9, "captured": 1e9}
    for _ in range(5):  # in turn, because other programs make the host slower at times
        bare = cost_us(lambda: kernel.fn.run(*args, grid=(1,), warmup=False, BLOCK=64, num_warps=4, num_ctas=1, num_stages=3))
        best["bare"] = min(best["bare"], bare)
        best["triton.autotune"] = min(best["triton.autotune"], cost_us(launch))
        startup.capture(folder)
        best["captured"] = min(best["captured"], cost_us(launch))
        startup.uninstall()
        startup.install(folder, miss="error")
        best["served"] = min(best["served"], cost_us(launch))
        assert startup.server().counts.hits == 1
        startup.uninstall()
    beyond = {name: best[name] - best["bare"] for name in ("triton.autotune", "served", "captured")}
    shown = ", ".join(f"{name} {value:.1f}" for name, value in beyond.items())
    print(f"{tensors + numbers} arguments, µs beyond a bare launch: {shown}; {beyond['served'] / beyond['triton.autotune']:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
