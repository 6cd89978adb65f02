"""Run journeys in processes of their own, on every GPU, several at a time where no times are judged, and say how each ended."""

import json
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Lock

from journey import FAILED, HERE, INTERRUPTED, LEFT_OUT, PASSED, ROOT, Journey

GPU_HERE = "JOURNEY_GPU_HERE"
"""A variable with the answer of `gpu_here`, where the sources cannot be asked."""
_MARK = "JOURNEY_MARK"
_GRACE_S = 3.0
_AT_ONCE = 6
_KEPT_BYTES = 1 << 20


@dataclass
class Ending:
    """The end of a journey.

    Attributes:
        passed: PASSED, FAILED, LEFT_OUT or INTERRUPTED.
        reason: why it failed or was not run; else remarks.
        modules: of the package, that its processes imported.
    """

    name: str
    passed: str
    seconds: float = 0.0
    reason: str = ""
    modules: list[str] = field(default_factory=list)


def gpu_here() -> dict[str, str]:
    """Return facts about the GPU and the source, by a process that leaves nothing on the GPU."""
    if text := os.environ.get(GPU_HERE):
        facts: dict[str, str] = json.loads(text)
        return facts
    code = (
        "import json, platform, torch; from kerneltune import device as d; c = d.current(); d.select_backend(); "
        "from kerneltune.processes.programs import commit; print(json.dumps({'slug': c.slug, 'name': c.name, 'arch': c.arch, "
        "'driver': c.driver, 'count': str(torch.cuda.device_count()), 'python': platform.python_version(), "
        "'commit': commit(), **d.versions()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=_environment({}), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"the GPU cannot be asked: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
    facts: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return facts


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without settings of kerneltune, with the package and the hook on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KERNELTUNE_", "JOURNEY_"))}
    path = [str(HERE / "site"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {"PYTHONPATH": os.pathsep.join(path), "PYTHONUSERBASE": site.getuserbase()} | more


def gpus_of(gpu: Mapping[str, str]) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES calls each GPU of a machine described by `gpu_here`; one empty name without a GPU."""
    count = int(gpu.get("count", 0))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (visible.split(",") if visible else [str(index) for index in range(count)])[:count] or [""]


def parts(journeys: Sequence[Journey], gpus: Sequence[str]) -> dict[str, list[Journey]]:
    """Divide journeys among GPUs, the longest limit first, each to the GPU that has least to do."""
    part_of: dict[str, list[Journey]] = {gpu: [] for gpu in gpus}
    seconds = dict.fromkeys(gpus, 0.0)
    for one in sorted(journeys, key=lambda one: -one.limit_s):
        gpu = min(gpus, key=seconds.__getitem__)
        part_of[gpu].append(one)
        seconds[gpu] += one.limit_s if one.alone else one.limit_s / 2
    return part_of


class Runner:
    """Runs journeys; `ended` holds how each of them ended, also after Ctrl-C."""

    def __init__(
        self, out: Path, gpu: Mapping[str, str], command: Sequence[str], keep: Callable[[Ending], None] = lambda _: None
    ) -> None:
        """out: folder of the outputs; command: runs a journey, with `--inside NAME --said FILE`; keep: gets each ending."""
        self.out, self.gpu, self._command, self._keep = out, gpu, list(command), keep
        self.ended: dict[str, Ending] = {}
        self._stop, self._keeping = Event(), Lock()
        self._began = time.monotonic()

    def run(self, journeys: Sequence[Journey]) -> None:
        """Run journeys: on each GPU its part, first those that may share a GPU, side by side, then the rest one by one."""
        self.out.mkdir(parents=True, exist_ok=True)
        pool = ThreadPoolExecutor()
        try:
            ran = [pool.submit(self._run_part, part, gpu) for gpu, part in parts(journeys, gpus_of(self.gpu)).items()]
            for part in wait(ran).done:
                part.result()
        except BaseException:
            self._stop.set()
            for one in journeys:
                self.ended.setdefault(one.name, Ending(one.name, INTERRUPTED))
            raise
        finally:
            pool.shutdown()

    def _run_part(self, journeys: Sequence[Journey], gpu: str) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(partial(self._one, gpu=gpu), (one for one in journeys if not one.alone)))
        for one in journeys:
            if one.alone:
                self._one(one, gpu)

    def _say(self, ending: Ending) -> None:
        since = time.monotonic() - self._began
        first = ending.reason.splitlines()[0] if ending.reason else ""
        print(f"{since:5.0f} s  {ending.name}: {ending.passed}, {ending.seconds:.0f} s  {first}"[:200], flush=True)
        if ending.passed == FAILED:
            print(ending.reason, flush=True)

    def _one(self, journey: Journey, gpu: str) -> None:
        if self._stop.is_set():
            return
        began = time.monotonic()
        try:
            ending = self._run(journey, gpu)
        except Exception as error:  # of the runner: the other journeys go on
            ending = Ending(journey.name, FAILED, reason=f"{type(error).__name__}: {error}")
        ending.seconds = time.monotonic() - began
        self.ended[journey.name] = ending
        with self._keeping:  # now: a machine may be gone before the end
            self._keep(ending)
        self._say(ending)

    def _run(self, journey: Journey, gpu: str) -> Ending:
        missing = journey.missing()
        if missing:
            return Ending(journey.name, LEFT_OUT, reason=f"{', '.join(missing)}: not installed")
        if self.gpu["slug"] == "interpreter" and not journey.without_gpu:
            return Ending(journey.name, LEFT_OUT, reason="needs a GPU")
        folder = Path(tempfile.mkdtemp(prefix="kt-"))
        try:
            return self._in_folder(journey, folder, gpu)
        finally:
            if self.ended.get(journey.name, Ending("", "")).passed != FAILED:
                shutil.rmtree(folder, ignore_errors=True)

    def _in_folder(self, journey: Journey, folder: Path, gpu: str) -> Ending:
        for name in ("home", "tmp", "place", "configs"):
            (folder / name).mkdir()
        mark, verdict_file, modules = uuid.uuid4().hex, folder / "said.json", folder / "modules.txt"
        environment = _environment({}) | {
            _MARK: mark,
            "JOURNEY_MODULES": str(modules),
            "JOURNEY_GPU": json.dumps(dict(self.gpu)),
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "KERNELTUNE_CONFIGS": str(folder / "configs"),
            "KERNELTUNE_RESULTS": str(folder / "results"),
            "COLUMNS": "120",
            "PYTHONUNBUFFERED": "1",
            **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}),
        }
        command = [*self._command, "--inside", journey.name, "--said", str(verdict_file)]
        output = self.out / f"{journey.name}.txt"
        with output.open("w") as file:
            process = subprocess.Popen(
                command, cwd=folder / "place", env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
            late = self._wait(process, journey.limit_s)
            end_marked(process, mark)
        module_names = sorted(set(modules.read_text().split())) if modules.is_file() else []
        if late:
            return self._failed(journey, late, folder, module_names)
        if process.returncode or not verdict_file.is_file():
            return self._failed(journey, _last_line(output) or f"exit code {process.returncode}", folder, module_names)
        verdict = json.loads(verdict_file.read_text())
        if verdict["passed"] == FAILED:
            return self._failed(journey, verdict["reason"], folder, module_names)
        return Ending(journey.name, verdict["passed"], reason=verdict["reason"], modules=module_names)

    def _wait(self, process: "subprocess.Popen[bytes]", limit_s: float) -> str:
        """Wait for the end; return the reason for ending the process, empty for a process that ended by itself."""
        until = time.monotonic() + limit_s
        while process.poll() is None:
            if self._stop.wait(0.1):
                return "interrupted"
            if time.monotonic() > until:
                return f"ended after {limit_s:g} s"
        return ""

    def _failed(self, journey: Journey, reason: str, folder: Path, modules: list[str]) -> Ending:
        kept = self.out / f"{journey.name}.failed"
        shutil.rmtree(kept, ignore_errors=True)
        with suppress(OSError, shutil.Error):
            shutil.copytree(folder, kept, ignore=_left_out, symlinks=True)
        shutil.rmtree(folder, ignore_errors=True)
        passed = INTERRUPTED if reason == "interrupted" else FAILED
        return Ending(journey.name, passed, reason=reason, modules=modules)


def _left_out(folder: str, names: list[str]) -> set[str]:
    """Return the entries of a folder that are not kept of a failed journey."""
    caches = {"triton", "home", "tmp", "inductor", "__pycache__", "triton-cache"}
    folders = {name for name in names if name in caches or name.startswith("served-")}
    for name in names:
        path = Path(folder, name)
        if path.is_file() and path.stat().st_size > _KEPT_BYTES:
            folders.add(name)
    return folders


def end_marked(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """End a journey and whatever it has started, in other sessions as well: by a mark in their environment."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        remaining = _marked(mark)
        if process.poll() is None:
            remaining.add(process.pid)
        if not remaining:
            return
        for pid in remaining:
            with suppress(OSError):
                os.kill(pid, number)
        until = time.monotonic() + _GRACE_S
        while time.monotonic() < until and (process.poll() is None or _marked(mark)):
            time.sleep(0.05)
    process.wait()


def _marked(mark: str) -> set[int]:
    """Return the processes that have a mark in their environment."""
    pids, wanted = set(), f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended, or is another user's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                pids.add(int(folder.name))
    return pids


def _last_line(output: Path) -> str:
    lines = output.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def table(endings: Iterable[Ending]) -> str:
    """Return a line for each journey, and how to run each that failed alone."""
    endings = list(endings)
    width = max((len(one.name) for one in endings), default=0)
    lines = [f"{'journey':{width}}  passed       seconds"]
    for one in endings:
        more = "  " + one.reason.splitlines()[0][:100] if one.reason else ""
        lines.append(f"{one.name:{width}}  {one.passed:11}  {one.seconds:7.0f}{more}")
    failed = [one.name for one in endings if one.passed == FAILED]
    lines += ["", f"{sum(one.passed == PASSED for one in endings)} of {len(endings)} passed"]
    return "\n".join([*lines, *(f"run alone: make gpu JOURNEY={name}" for name in failed)])
