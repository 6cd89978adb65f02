"""A small module of autotuned kernels, captures of it, and tables for it."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from warm_python import python

from kerneltune.adopt import program, startup, table
from kerneltune.adopt.configs import StoredConfig
from kerneltune.adopt.folder import KernelCode, LaunchClass
from kerneltune.adopt.overview import Capture, read_capture
from kerneltune.adopt.table import Group, ServingRow, ServingTable, TableKernel

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "two_kernels"


def example() -> Any:
    """Import the example's module."""
    if str(EXAMPLE) not in sys.path:
        sys.path.append(str(EXAMPLE))
    import two_kernels

    return two_kernels


def imported(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> Iterator[Any]:
    """Yield a module of this name and source, for a fixture."""
    (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    yield __import__(name)
    del sys.modules[name]


def captured(folder: Path, *sizes: tuple[int, int], **options: Any) -> Capture:
    """Capture the example at these rows and columns, in this process."""
    module = example()
    startup.capture(folder, **options)
    try:
        for rows, columns in sizes or ((4, 96),):
            module.step(rows, columns)
        startup.recorder().flush()
    finally:
        startup.uninstall()
        forget(module)
    return read_capture(folder)


def forget(module: Any) -> None:
    """Drop what capture and serving remember of the kernels, as in a new process."""
    for kernel in (module.row_sum, module.scale_chosen):
        served = kernel.__dict__.pop("kerneltune_served", None)
        if served is not None:
            kernel.configs = served.configs
        kernel.__dict__.pop("_kerneltune_recorded", None)
        kernel.cache.clear()


def of_kernel(capture: Capture, name: str) -> list[LaunchClass]:
    """Return the classes of a kernel."""
    return [launch for launch in capture.classes if launch.kernel.name == name]


def author_configs(launch: LaunchClass) -> list[StoredConfig]:
    """Return the author's configs."""
    return [one.config for one in launch.candidates]


def kernel_of(launches: Sequence[LaunchClass], configs: Sequence[StoredConfig], **changes: Any) -> TableKernel:
    """Return the part of a table that serves each class with these configs, the first chosen; a group for each class."""
    first = launches[0]
    groups = tuple(
        Group(one.key_values, one.dtypes, (), (ServingRow(one.sizes, tuple(configs), {"class": one.digest}),)) for one in launches
    )
    fields: dict[str, Any] = {"module": first.kernel.module, "name": first.kernel.name, "package": first.versions["package"]}
    fields |= {name: getattr(first, name) for name in KernelCode.__struct_fields__}
    fields |= {"groups": groups, "shared": (configs[0],)}
    return TableKernel(**(fields | changes))


def write_table(root: Path, *kernels: TableKernel, device: str = "") -> str:
    """Write a table and its manifest; returns the SHA-256."""
    return table.write_table(root, ServingTable(device or program.device_slug(), {}, kernels))


def run_python(code: str, *arguments: str, interpreter: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new process that finds this package; without an interpreter, torch is imported."""
    path = os.pathsep.join([str(ROOT), str(EXAMPLE), os.environ.get("PYTHONPATH", "")])
    command = [interpreter or python(), "-c", code, *arguments]
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True, check=False
    )


def tuned_folder(root: Path, chosen: int = 3, **changes: Any) -> list[StoredConfig]:
    """Capture the example at 96 columns and write a table that serves its row_sum with one of its configs."""
    launches = of_kernel(captured(root), "row_sum")
    configs = author_configs(launches[0])
    order = [configs[chosen], *(config for config in configs if config is not configs[chosen])]
    write_table(root, kernel_of(launches, order, **changes))
    return order


def served(root: Path, **options: Any) -> Any:
    """Start serving in this process."""
    startup.install(root, **options)
    return startup.server()
