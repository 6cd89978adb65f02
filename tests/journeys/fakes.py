"""Journeys for tests of the runner, and a simulated GPU."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import program
import proof
import runner
from journey import NotRun, Place, journey, require

GPU = {
    "slug": "nvidia_fake", "name": "NVIDIA Fake", "arch": "sm_0", "driver": "1", "python": "3", "torch": "2", "triton": "3",
    "commit": "4010a35", "count": "2",
}  # fmt: skip


@journey(limit_s=60)
def fine(place: Place) -> None:
    """Import a module of the package in a process that is killed at once, and pass; remark on the GPU."""
    code = "import kerneltune.stats, os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    place.python("-c", code, code=-9)
    place.remarks.append(f"on GPU {os.environ['CUDA_VISIBLE_DEVICES']}")


@journey(limit_s=60)
def broken(place: Place) -> None:
    """Fail, and leave a file."""
    (place.folder / "left.txt").write_text("seen")
    require(False, "promised otherwise\nmore lines")


@journey(limit_s=2)
def hangs(place: Place) -> None:
    """Start a process in a session of its own, then hang, both of them."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("before it hangs", flush=True)
    Path(os.environ["FAKE_PID"]).write_text(str(child.pid))
    time.sleep(600)


@journey(limit_s=60)
def unable(place: Place) -> None:
    """Lack a tool."""
    raise NotRun("no such tool")


@journey(packages=("no_such_package",))
def lacking(place: Place) -> None:
    """Lack a package."""


@journey(limit_s=60, alone=True)
def slow(place: Place) -> None:
    """Take long."""
    Path(os.environ["FAKE_PID"]).write_text(str(os.getpid()))
    time.sleep(600)


def seconds() -> float:
    """Return the time of a clock that the journeys `hangs` and `slow` put on by 3 s as soon as they are on their way."""
    pid = Path(os.environ["FAKE_PID"])
    return 3.0 if pid.is_file() and pid.read_text() else 0.0


if __name__ == "__main__":
    runner.time = SimpleNamespace(monotonic=seconds, sleep=time.sleep)
    program.gpu_here = lambda: GPU
    proof.ROOT = Path(os.environ.get("GPU_OUT", "."))
    sys.exit(program.exit_code((sys.executable, __file__)))
