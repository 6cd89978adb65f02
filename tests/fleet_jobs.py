"""A made-up operator and processes without a GPU for test_fleet.py, importable by these processes.

Environment: LOG, a file that every evaluation is appended to; DIE, a folder of files named after a case, each of which the
process that first comes to its best config names after itself and dies of; DEADLY, a case whose best config
every process dies of; STOPPED, a case and what ends at its first config; MODEL, the GPU's name; TOGETHER, an empty folder, where
two processes wait for each other; HELD, the number of evaluations after which none ends.

Run as `python fleet_jobs.py FOLDER` it is a whole run on two GPUs, which test_fleet.py interrupts. Like the command line it
ends with 130 then and says nothing of where it was, so that whatever stands on stderr is of another process.
"""

import os
import signal
import sys
import time
from pathlib import Path

from fake_operator import H200, OP, VARIANT, Bench, Knobs, Pool

from kerneltune import cache, device
from kerneltune.device import Device
from kerneltune.plan import Options
from kerneltune.processes.start import WorkerStoppedError
from kerneltune.progress import Progress
from kerneltune.search.loop import SearchLimits
from kerneltune.spec import Case, Config
from kerneltune.task import Evaluation, Task
from kerneltune.tune import session
from kerneltune.tune.fleet import Fleet
from kerneltune.tune.session import TuningSession

LOG, DIE, MODEL = "KERNELTUNE_TEST_LOG", "KERNELTUNE_TEST_DIE", "KERNELTUNE_TEST_MODEL"
DEADLY, STOPPED = "KERNELTUNE_TEST_DEADLY", "KERNELTUNE_TEST_STOPPED"
TOGETHER, HELD = "KERNELTUNE_TEST_TOGETHER", "KERNELTUNE_TEST_HELD"
WORKS = [Task(OP, Case(f"m{size}", (("M", size),), "bfloat16"), VARIANT) for size in (8, 16, 32, 64, 128)]


class LoggedBench(Bench):
    """Writes down what it is asked for; takes its whole process along where it is told to."""

    def measure(self, task: Task, config: Config, best_us: float | None) -> Evaluation:
        """Ten milliseconds of work; a case's best config may be the last that a process evaluates."""
        time.sleep(0.01)
        if together := os.environ.get(TOGETHER):
            Path(together, str(os.getpid())).touch()
            while len(os.listdir(together)) < 2:
                time.sleep(0.01)
        if HELD in os.environ and len(Path(os.environ[LOG]).read_text().splitlines()) >= int(os.environ[HELD]):
            time.sleep(3600)
        deadly = Path(os.environ[DIE]) / task.case.name
        case, _, ended = os.environ.get(STOPPED, "").partition(" ")
        if task.case.name == case:
            _end(ended)
        if config == Knobs(3, 8) and os.environ.get(DEADLY) == task.case.name:
            os._exit(9)
        if config == Knobs(3, 8) and deadly.exists():
            deadly.rename(deadly.with_name(f"{os.getpid()}.dead"))
            os._exit(9)
        with open(os.environ[LOG], "a") as file:
            file.write(f"{task.case.name} {config.block} {config.warps} {os.getpid()}\n")
        return super().measure(task, config, best_us)


def _end(what: str) -> None:
    if what == "its code":
        raise OSError("no table of shapes")
    if what == "its GPU worker":
        raise WorkerStoppedError("the GPU worker was ended from outside: exit code -15")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def fake_session(options: Options, _cores: frozenset[int] | None) -> TuningSession:
    """Return a session on a GPU that is made up, on all cores."""
    unit = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpu = Device(os.environ.get(MODEL, H200.name), "sm_90", 132, 50 << 20, "580", unit)
    setattr(device, "current", lambda: gpu)  # noqa: B010
    setattr(session, "CompilePool", Pool)  # noqa: B010
    setattr(session, "GpuWorker", LoggedBench)  # noqa: B010
    setattr(session, "why_not_timed", lambda *_: None)  # noqa: B010
    return TuningSession(options)


def odd(options: Options, cores: frozenset[int] | None) -> TuningSession:
    """Return a session; for the second GPU of the host, a session on another GPU model."""
    if os.environ["CUDA_VISIBLE_DEVICES"] == "1":
        os.environ[MODEL] = "NVIDIA A100"
    return fake_session(options, cores)


def main(folder: Path) -> None:
    """Tune all works on two GPUs; results, configs and a file `began` are below `folder`."""
    setattr(device, "current", lambda: H200)  # noqa: B010
    cache.use_root(folder / "configs")
    options = Options(results=folder / "results", search=SearchLimits())
    (folder / "began").touch()
    Fleet(["0", "1"], options, Progress(), fake_session).run(WORKS)


if __name__ == "__main__":
    import fleet_jobs  # by the name under which the processes find what is here

    try:
        fleet_jobs.main(Path(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
