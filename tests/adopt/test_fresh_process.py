"""Kernels of a capture are found again in a process in which nothing is imported: compiled ones, and by a sweep interpreted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from adopted import ROOT
from warm_python import python

KERNEL = """
@triton.autotune([triton.Config({{"BLOCK": block}}) for block in (32, 64)], key=["N"])
@triton.jit
def {name}(x_ptr, N, kind: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x_ptr + places, mask=places < N).to(kind)
    tl.store(x_ptr + places, values + {added}, mask=places < N)
"""
HEAD = "import triton\nimport triton.language as tl\n"
FILES = {
    "site/alone.py": HEAD + KERNEL.format(name="of_module", added="1"),
    "site/layered/__init__.py": "from .ops.inner import kernels\n",
    "site/layered/constants.py": "import triton.language as tl\nSTEP = tl.constexpr(2)\n",
    "site/layered/ops/__init__.py": "",
    "site/layered/ops/inner/__init__.py": "",
    "site/layered/ops/inner/kernels.py": HEAD
    + "from ...constants import STEP\n"
    + KERNEL.format(name="of_package", added="STEP"),
    "project/lib/__init__.py": "",
    "project/lib/beside.py": HEAD + KERNEL.format(name="of_neighbour", added="8"),
    "project/program.py": "import torch\n"
    + HEAD
    + "from alone import of_module\nfrom layered.ops.inner.kernels import of_package\nfrom lib.beside import of_neighbour\n"
    + KERNEL.format(name="of_script", added="4")
    + "x = torch.zeros(40)\n"
    + "for kernel in (of_module, of_neighbour, of_package, of_script):\n"
    + "    kernel[lambda meta: (triton.cdiv(40, meta['BLOCK']),)](x, 40, tl.float32)\n"
    + "print(x.sum().item())\n",
}
LOAD = """
import sys
from pathlib import Path
assert not {"torch", "triton"} & sys.modules.keys()
from kerneltune.adopt.operators import *
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.tuning import why_untunable
from kerneltune.adopt.replay import live_kernel, make_replay
assert "triton" not in sys.modules
root = Path(sys.argv[1])
for launch in sorted(read_capture(root).classes, key=lambda one: one.kernel.name):
    if sys.argv[2:] and launch.kernel.name not in sys.argv[2:]:
        continue
    make_replay(launch, root / "classes" / launch.digest, "cpu", 0)
    print(launch.kernel.name, why_untunable(launch) or "found in " + live_kernel(launch).base_fn.__module__)
"""


def start(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a fresh process with this package and the folder's packages on its path."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "site"), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a program in `project`, the packages that it imports, and a capture of it in `captured`."""
    program = tmp_path_factory.mktemp("program")
    for name, text in FILES.items():
        (program / name).parent.mkdir(parents=True, exist_ok=True)
        (program / name).write_text(text)
    done = start(program, python(), "-m", "kerneltune", "capture", "--out", "captured", "--", python(), "project/program.py")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "600.0"), done.stderr
    return program


def test_kernels_of_a_capture_are_found_in_a_fresh_process(folder: Path) -> None:
    done = start(folder, sys.executable, "-c", LOAD, "captured")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "of_module found in alone",
        "of_neighbour found in lib.beside",
        "of_package found in layered.ops.inner.kernels",
        "of_script found in __mp_main__",
    ]


def test_sweep_of_a_capture_checks_every_kernel_in_a_fresh_process(folder: Path) -> None:
    done = start(folder, python(), "-m", "kerneltune", "sweep", "captured", "--check-only", "--results", "records")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [name for name in ("of_module", "of_neighbour", "of_package", "of_script") if name not in done.stdout] == []


def test_module_that_no_longer_needs_triton_is_named_in_a_fresh_process(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "alone.py").write_text("of_module = None\n")
    done = start(tmp_path, sys.executable, "-c", LOAD, str(folder / "captured"), "of_module")
    assert done.returncode == 0, done.stderr
    assert "alone.py has no kernel of this name: capture again" in done.stdout
