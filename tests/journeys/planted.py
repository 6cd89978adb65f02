"""Plant regressions that no test without a GPU finds, and see whether the journeys find them: `make gpu-planted`.

Each is planted in a copy of the package, so that several run at once and the sources stay as they are.

Exit code 0: every regression was found. 1: a regression was missed. 2: no GPU, or bad input.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from journey import FAILED, ROOT
from runner import GPU_HERE, gpu_here

_AT_ONCE = 4
_COPIED = ("kerneltune", "tests")
_LEFT_OUT = (".git", ".venv")


@dataclass(frozen=True)
class Plant:
    """A regression.

    Attributes:
        file: that it is planted in.
        old: text that stands there once; `new` takes its place.
        journey: that must find it.
    """

    name: str
    file: str
    old: str
    new: str
    journey: str


PLANTS = (
    Plant(  # the driver is asked before NVML is started
        "nvml_not_started",
        "kerneltune/device.py",
        "        pynvml.nvmlInit()\n        driver = pynvml.nvmlSystemGetDriverVersion()",
        "        driver = pynvml.nvmlSystemGetDriverVersion()",
        "doctor",
    ),
    Plant(
        "unknown_architecture",
        "kerneltune/device.py",
        'f"sm_{gpu.major}{gpu.minor}"',
        'f"sm{gpu.major}{gpu.minor}"',
        "tune_two",
    ),
    Plant(  # in the interpreter the name and the folder are the same word
        "folder_of_another_name",
        "kerneltune/device.py",
        "    return current().slug\n",
        "    return current().name\n",
        "tune_two",
    ),
    Plant(  # the second of two launches
        "second_launch_missing",
        "kerneltune/kernel_lib/launch.py",
        '    return [(0, limit | {"launch_cooperative_grid": True})] if together else [(1, limit), (2, limit)]',
        "    return [(1, limit)]",
        "sweep_quick",
    ),
    Plant(
        "graph_captured_on_another_stream",
        "kerneltune/measuring/rounds.py",
        "            with torch.cuda.graph(graph):\n                self._walk()",
        "            with torch.cuda.graph(graph), torch.cuda.stream(torch.cuda.Stream()):\n                self._walk()",
        "sweep_family",
    ),
    Plant(
        "times_read_before_their_end",
        "kerneltune/measuring/rounds.py",
        "for name in order}\n        torch.cuda.synchronize()\n",
        "for name in order}\n",
        "sweep_family",
    ),
    Plant(  # the script's kernel depends on a variable
        "child_without_environment",
        "kerneltune/processes/start.py",
        "dict(os.environ if environment is None else environment)",
        "dict(environment or {})",
        "adopt_script",
    ),
    Plant(  # the branch of the CPU has memory of its own
        "arguments_on_the_cpu",
        "kerneltune/adopt/replay.py",
        "else torch.zeros(size, dtype=torch.uint8, device=device)",
        "else torch.zeros(size, dtype=torch.uint8)",
        "adopt_script",
    ),
    Plant(  # as at b36a97c
        "triton_not_imported_yet",
        "kerneltune/adopt/replay.py",
        "    from triton.runtime.autotuner import Autotuner",
        '    Autotuner: Any = sys.modules["triton.runtime.autotuner"].Autotuner',
        "adopt_two_processes",
    ),
    Plant(
        "scale_left_out",
        "kerneltune/nn/grouped_mm.py",
        "scales = scale_a.view(()), scale_b.view(())",
        "scales = scale_a.view(()), torch.ones_like(scale_b).view(())",
        "train_dense",
    ),
    Plant(
        "gpu_refused",
        "kerneltune/nn/recipes.py",
        "is_compiling() and not (b.is_cuda or INTERPRETED or b.is_meta):",
        "is_compiling() and not (INTERPRETED or b.is_meta):",
        "train_experts",
    ),
    Plant(  # the interpreter has a branch of its own
        "codes_in_another_order",
        "kerneltune/ops/int4_gemm/kernels/warps.py",
        "low = tl.join(tl.join(d[0], d[4]), tl.join(d[2], d[6]))",
        "low = tl.join(tl.join(d[0], d[2]), tl.join(d[4], d[6]))",
        "decode_int4",
    ),
)


def copied(plant: Plant, folder: Path) -> Path:
    """Make a tree with a regression planted; return its journeys.

    Raises:
        ValueError: its text does not stand in the file once.
    """
    for entry in ROOT.iterdir():
        if entry.name not in (*_COPIED, *_LEFT_OUT):
            (folder / entry.name).symlink_to(entry)
    shutil.copytree(ROOT / "kerneltune", folder / "kerneltune", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    shutil.copytree(ROOT / "tests" / "journeys", folder / "tests" / "journeys", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / plant.file
    text = file.read_text(encoding="utf-8")
    if text.count(plant.old) != 1:
        raise ValueError(f"{plant.name}: {plant.file}: {plant.old!r} stands there {text.count(plant.old)} times, expected 1")
    file.write_text(text.replace(plant.old, plant.new), encoding="utf-8")
    return folder / "tests" / "journeys"


@dataclass(frozen=True)
class Found:
    """The answer of the journey to a regression; was_found: whether the journey failed."""

    plant: Plant
    was_found: bool
    seconds: float
    said: str


def find(plant: Plant, out: Path, gpu: Mapping[str, str]) -> Found:
    """Run the journey of a regression in its own tree; gpu: as the sources without it say."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kt-") as folder:
        journeys = copied(plant, Path(folder))
        kept = out / plant.name
        command = [sys.executable, str(journeys), "--only", plant.journey, "--out", str(kept), "--no-proof", "--without-gpu"]
        environment = os.environ | {GPU_HERE: json.dumps(dict(gpu))}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        (kept / "planted.txt").write_text(done.stdout + done.stderr) if kept.is_dir() else None
    try:
        (ended,) = json.loads((kept / "summary.json").read_text())["journeys"]
        was_found, said = ended["passed"] == FAILED, f"{ended['passed']}: {ended['reason']}"
    except (OSError, ValueError):
        was_found, said = False, f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['nothing said'])[-1]}"
    return Found(plant, was_found, time.monotonic() - began, said)


def main(names: Sequence[str]) -> int:
    """Plant the regressions of these names, all without a name."""
    plants = {plant.name: plant for plant in PLANTS}
    for name in names:
        if name not in plants:
            raise ValueError(f"{name!r}: expected one of {', '.join(plants)}")
    gpu = gpu_here()
    if gpu["slug"] == "interpreter":
        raise ValueError("no NVIDIA GPU that torch can use: journeys run on one")
    out = Path(os.environ.get("GPU_OUT") or ROOT / "results" / "runs" / "gpu").resolve() / "planted"
    out.mkdir(parents=True, exist_ok=True)
    chosen = [plants[name] for name in names or plants]
    chosen.sort(key=lambda plant: plant.journey not in ("sweep_quick", "tune_two", "adopt_script"))  # the longest first
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        results = []
        for one in pool.map(lambda plant: find(plant, out, gpu), chosen):
            results.append(one)
            print(line(one), flush=True)
    text = "\n".join(map(line, results)) + f"\n{sum(one.was_found for one in results)} of {len(results)} found\n"
    (out / "table.txt").write_text(text)
    print(text.splitlines()[-1])
    return int(not all(one.was_found for one in results))


def line(one: Found) -> str:
    """Return a line of the table."""
    first_line = one.said.splitlines()[0][:90] if one.said else ""
    return (
        f"{one.plant.name:34}{one.plant.journey:22}{'found' if one.was_found else 'MISSED':8}{one.seconds:5.0f} s  {first_line}"
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
