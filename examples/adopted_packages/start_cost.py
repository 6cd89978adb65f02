"""Measure the start of a served program with an empty Triton cache, with and without what kerneltune prepares.

`python start_cost.py WORK FILE` captures gla_layer.py, serves its authors' first configs, and appends a line of JSON to the file
for each process: `all` prepares everything, `kernels` only copies compiled kernels, `nothing` does neither. MODES in the
environment names the processes. Needs a GPU and flash-linear-attention.
"""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

GLA = Path(__file__).resolve().with_name("gla_layer.py")
KERNELTUNE = [sys.executable, "-m", "kerneltune"]


def child(mode: str, program: str, *arguments: str) -> None:
    """Run a program whose served start prepares `all`, copies `kernels` only, or does `nothing`."""
    from kerneltune.adopt import startup

    if mode == "nothing":
        startup._prepared = lambda *_: None
    elif mode == "kernels":
        from kerneltune.adopt import ahead

        ahead.prepare = lambda *_: None
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")


def write_first_configs(root: Path) -> None:
    """Write a table that serves the author's first config to every captured class, with its compiled kernels."""
    from kerneltune import device
    from kerneltune.adopt.folder import KernelCode
    from kerneltune.adopt.overview import read_capture
    from kerneltune.adopt.shared_rows import keep_compiled
    from kerneltune.adopt.table import Group, ServingRow, ServingTable, TableKernel, write_table
    from kerneltune.progress import Progress

    capture, kernels = read_capture(root), []
    for launches in capture.by_kernel():
        groups: dict[str, Group] = {}
        for one in launches:
            row = ServingRow(one.sizes, (one.first_config,), {"class": one.digest})
            groups.setdefault(repr((one.key_values, one.dtypes)), Group(one.key_values, one.dtypes, (), (row,)))
        of = launches[0]
        code = {name: getattr(of, name) for name in KernelCode.__struct_fields__}
        package = of.versions.get("package", "")
        kernels.append(TableKernel(of.kernel.module, of.kernel.name, package, tuple(groups.values()), (), **code))
    table = ServingTable(device.current().slug, {}, tuple(kernels))
    write_table(root, table)
    tuned: list[Any] = [SimpleNamespace(launch_class=launch) for launch in capture.classes if not launch.problem]
    keep_compiled(root, table, tuned, Progress())
    sys.stdout.write(json.dumps({"kernels": len(kernels), "entries": len(list((root / "compiled").iterdir()))}) + "\n")


def run(out: Path, what: str, command: list[str], cache: Path, limit_s: float) -> None:
    """Run a command and append its row."""
    began = time.perf_counter()
    row: dict[str, Any] = {"what": what}
    try:
        done = subprocess.run(
            command,
            env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_s,
        )
        line = next((json.loads(text) for text in reversed(done.stdout.splitlines()) if text.startswith("{")), None)
        row |= {"exit": done.returncode, "result": line}
        if done.returncode or line is None:
            row |= {"stdout": done.stdout[-1500:], "stderr": done.stderr[-2500:]}
    except subprocess.TimeoutExpired:
        row["timeout"] = limit_s
    row["wall_s"] = round(time.perf_counter() - began, 2)
    with out.open("a") as file:
        file.write(json.dumps(row) + "\n")


def main(work: Path, out: Path) -> None:
    """Capture, write the table, and start the program in each way."""
    capture = work / "gla"
    run(
        out,
        "capture",
        [*KERNELTUNE, "capture", "--out", str(capture), "--", sys.executable, str(GLA), "captured"],
        work / "t",
        110,
    )
    run(out, "table", [sys.executable, __file__, "--table", str(capture)], work / "t", 60)
    work.mkdir(parents=True, exist_ok=True)
    modes = os.environ.get("MODES", "all kernels kernels all all kernels nothing").split()
    for number, mode in enumerate(modes):
        serve = [*KERNELTUNE, "serve", "--configs", str(capture), "--"]
        program = [sys.executable, __file__, "--child", mode, str(GLA), mode]
        run(out, f"serve {mode}", [*serve, *program], work / f"empty{number}", 70)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(*sys.argv[2:])
    elif sys.argv[1] == "--table":
        write_first_configs(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
