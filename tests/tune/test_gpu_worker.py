"""The GPU worker: a config that crashes, hangs or exhausts memory fails alone, and the next config is measured.

The same with deliberately broken kernels on a GPU is at the end.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import bench_jobs
import fake_operator
import pytest
from bench_jobs import CASE, OPS, VARIANT, FakeBench, HangsInEveryRequest, Knobs, NeverOpens
from subprocesses import environment, wait_for

from kerneltune import cache, misses
from kerneltune.processes.start import WorkerStoppedError
from kerneltune.processes.worker import State, Worker, WorkerCrashedError, _into, _serve
from kerneltune.spec import Config
from kerneltune.task import Evaluation, Outcome, Run, Task
from kerneltune.tune import gpu_worker as tuning_bench
from kerneltune.tune.gpu_worker import GpuBench, GpuWorker, compare_in_worker, split_cores

TASK = Task(OPS[0], CASE, VARIANT)


@pytest.fixture
def worker() -> Iterator[GpuWorker]:
    with GpuWorker(FakeBench, config_timeout_s=600.0) as worker:
        yield worker


def test_worker_returns_results_of_the_bench_from_one_process(worker: GpuWorker) -> None:
    first, second = worker.measure(TASK, Knobs("run", 1), None), worker.measure(TASK, Knobs("run", 2), 11.0)
    assert (first, second.time_us) == (Evaluation("passed", 11.0, first.reason), 12.0)
    assert first.reason.split()[1] == second.reason.split()[1] != str(os.getpid())
    assert second.reason.startswith("2 ")
    assert worker.started == 1
    assert [list(s[:1]) for s in worker.time_interleaved(TASK, [Knobs("run", 1), Knobs("run", 3)])] == [[11.0], [13.0]]


def test_worker_without_a_driver_raises_its_error_when_a_case_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    began = threading.Event()

    def fails() -> None:
        began.set()
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(tuning_bench, "open_driver", fails)
    gpu = GpuBench()
    assert began.wait(60), "begun before a case is known"
    with pytest.raises(RuntimeError, match=r"^no C compiler$"):
        gpu.prepare(TASK)


@pytest.mark.parametrize("time_us", [0.0, -1.0, float("nan"), float("inf")])
def test_bench_with_a_time_of_0_or_nan_returns_a_failure(time_us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_bench, "open_driver", lambda: None)
    monkeypatch.setattr(tuning_bench, "input_sets", lambda _task: [{}])
    monkeypatch.setattr(tuning_bench, "contender", lambda *_, **__: SimpleNamespace(sample_us=lambda: time_us))
    monkeypatch.setattr(GpuBench, "check", lambda *_: Outcome("checked"))
    monkeypatch.setattr(tuning_bench, "Checker", lambda *_, **__: None)
    assert GpuBench().measure(TASK, Knobs("run", 1), None) == Evaluation("failed", None, f"measured {time_us} µs")


def test_bench_looks_configs_up_again_for_the_next_task(configs_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command may have tuned an operator that the task's operator calls. A miss is warned of once."""
    called, looked_up = Task(fake_operator.OP, fake_operator.CASE, fake_operator.VARIANT), list[Config]()

    def look_up(_task: Task) -> None:
        misses.report(called.key, "nvidia_h200", str, ())
        looked_up.append(called.config_of_call())

    monkeypatch.setattr(tuning_bench, "open_driver", lambda: None)
    monkeypatch.setattr(tuning_bench, "input_sets", look_up)
    monkeypatch.setattr(tuning_bench, "Checker", lambda *_, **__: None)
    gpu = GpuBench()
    with pytest.warns(misses.CacheMissWarning) as caught:
        gpu.prepare(TASK)
        with mock.patch.object(cache, "clear"):  # as another process stores it
            cache.store("interpreter", cache.CacheEntry(**called.key._asdict(), config={"block": 3, "warps": 8}))
        gpu.prepare(TASK)
        gpu.prepare(replace(TASK, policy="hot"))
    assert looked_up == [fake_operator.Knobs(0, 1)] * 2 + [fake_operator.Knobs(3, 8)]
    assert len(caught) == 1


def test_worker_begun_early_answers_later_requests(worker: GpuWorker) -> None:
    worker.begin()
    begun = worker.process
    worker.begin()
    assert worker.measure(TASK, Knobs("run", 1), None).status == "passed"
    assert begun is not None
    assert begun is worker.process
    assert worker.started == 1


def test_crash_of_a_request_quotes_no_error_of_an_earlier_quiet_request() -> None:
    with Worker(bench_jobs.Prints, "the worker", quiet=("whisper",)) as worker:
        worker.ask("whisper")
        with pytest.raises(WorkerCrashedError, match=r"^the worker died: exit code -6$"):
            worker.ask("die")


def test_warning_of_a_worker_is_a_line() -> None:
    with Worker(bench_jobs.Prints, "the worker") as worker:
        assert worker.ask("warning") == "warning: no config; using the default\n"


def test_output_of_a_quiet_request_goes_to_a_new_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def write(text: str) -> None:
        for number in (1, 2):
            os.write(number, f"{text}\n".encode())

    for path, text in ((None, "shown"), (tmp_path / "output", "earlier"), (tmp_path / "output", "quiet"), (None, "shown again")):
        with _into(path):
            write(text)
    assert capfd.readouterr() == ("shown\nshown again\n", "shown\nshown again\n")
    assert (tmp_path / "output").read_text() == "quiet\nquiet\n"


@pytest.mark.parametrize(
    ("does", "detail"),
    [
        ("abort", "the GPU worker died: exit code -6"),
        ("llvm", "the GPU worker died: exit code -6: LLVM ERROR: cannot select"),
        ("exit", "the GPU worker died: exit code 7"),
        ("memory", "MemoryError: no memory for 17 tensors"),
        ("fault", "RuntimeError: CUDA error: an illegal memory access was encountered"),
    ],
)
def test_worker_after_a_config_that_crashes_measures_the_next_config(does: str, detail: str, worker: GpuWorker) -> None:
    before = worker.measure(TASK, Knobs("run", 1), None)
    assert worker.measure(TASK, Knobs(does, 0), None) == Evaluation("crashed", None, detail)
    after = worker.measure(TASK, Knobs("run", 2), None)
    assert after.status == "passed"
    assert after.reason.startswith("1 ")
    assert after.reason.split()[1] != before.reason.split()[1]
    assert worker.started == 2


def test_worker_kills_a_config_that_hangs() -> None:
    with GpuWorker(FakeBench, config_timeout_s=600.0) as worker:
        assert worker.measure(TASK, Knobs("run", 1), None).status == "passed"
        worker.config_timeout_s = 1.0
        hung = worker.process
        assert worker.measure(TASK, Knobs("hang", 0), None) == Evaluation("crashed", None, "took longer than 1 s")
        assert hung is not None
        assert hung.exitcode == -9
        worker.config_timeout_s = 600.0
        assert worker.measure(TASK, Knobs("run", 2), None).status == "passed"


def test_worker_killed_between_two_configs_measures_both(worker: GpuWorker) -> None:
    assert worker.measure(TASK, Knobs("run", 1), None).status == "passed"
    assert worker.process is not None
    worker.process.kill()
    worker.process.join()
    assert worker.measure(TASK, Knobs("run", 2), None).status == "passed"
    assert worker.started == 2


def test_worker_that_cannot_prepare_a_case_raises() -> None:
    with GpuWorker(NeverOpens) as worker, pytest.raises(WorkerCrashedError, match=r"^MemoryError: inputs do not fit$"):
        worker.measure(TASK, Knobs("run", 1), None)


def test_worker_that_ends_leaves_no_process(worker: GpuWorker) -> None:
    worker.measure(TASK, Knobs("run", 1), None)
    process = worker.process
    worker.close()
    assert process is not None
    assert process.is_alive()
    with worker:
        pass
    assert not process.is_alive()
    assert process not in multiprocessing.active_children()


@pytest.mark.parametrize("end", [GpuWorker.stop, lambda worker: worker.__exit__()])
def test_worker_stopped_by_another_thread_raises(
    end: Callable[[GpuWorker], None], worker: GpuWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(bench_jobs.LOG, str(tmp_path / "log"))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(worker.measure, TASK, Knobs("hang", 0), None)
        queued = thread.submit(worker.measure, TASK, Knobs("run", 1), None)
        wait_for((tmp_path / "log").exists)
        assert worker.state is State.ANSWERING
        process = worker.process
        end(worker)
        for trial in (running, queued):
            with pytest.raises(WorkerStoppedError, match=r"^the GPU worker was stopped$"):
                trial.result(timeout=60)
    assert process is not None
    assert not process.is_alive()
    assert worker.started == 1
    end(worker)
    worker.close()


@pytest.mark.parametrize(("to_server", "exit_code"), [(0, -15), (signal.SIGSTOP, -15), (signal.SIGKILL, 255)])
def test_worker_sent_sigterm_raises(
    to_server: int, exit_code: int, worker: GpuWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server of processes, which tells their exit codes, may stall, or may be ended as well."""
    monkeypatch.setenv(bench_jobs.LOG, str(tmp_path / "log"))
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(worker.measure, TASK, Knobs("hang", 0), None)
        wait_for((tmp_path / "log").exists)
        assert worker.state is State.ANSWERING
        assert worker.process is not None
        assert worker.process.pid is not None
        server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        os.kill(server, to_server)
        if to_server == signal.SIGKILL:
            os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
        os.kill(worker.process.pid, signal.SIGTERM)
        try:
            with pytest.raises(WorkerStoppedError, match=f"^the GPU worker was ended from outside: exit code {exit_code}$"):
                running.result(timeout=60)
        finally:
            os.kill(server, signal.SIGCONT)
    assert worker.measure(TASK, Knobs("run", 1), None).status == "passed"


@pytest.mark.parametrize(
    "request_to",
    [
        lambda worker: worker.check(TASK, Knobs("hang", 0)),
        lambda worker: compare_in_worker(worker, "f", [Run(TASK, Knobs("hang", 0))], None),
    ],
    ids=["check", "compare"],
)
def test_request_of_a_worker_that_is_sent_sigterm_is_not_the_variants_failure(
    request_to: Callable[[GpuWorker], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with GpuWorker(HangsInEveryRequest, config_timeout_s=600.0) as worker, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(request_to, worker)
        wait_for(lambda: worker.state is State.ANSWERING)
        assert worker.process is not None
        worker.process.terminate()
        with pytest.raises(WorkerStoppedError, match=r"^the GPU worker was ended from outside: exit code -15$"):
            answer.result(timeout=60)


def test_request_after_an_interrupted_request_gets_its_own_answer(worker: GpuWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker.measure(TASK, Knobs("run", 1), None).time_us == 11.0

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(worker, "_receive", interrupted)
        worker.ask("measure", TASK, Knobs("run", 2), None)
    assert worker.measure(TASK, Knobs("run", 3), None).time_us == 13.0


def test_request_that_cannot_be_pickled_leaves_the_process(worker: GpuWorker) -> None:
    assert worker.measure(TASK, Knobs("run", 1), None).time_us == 11.0
    with pytest.raises(Exception, match="pickle"):
        worker.ask("measure", lambda: None)
    assert worker.measure(TASK, Knobs("run", 2), None).time_us == 12.0
    assert worker.started == 1


def test_worker_has_a_core_that_no_compiler_uses() -> None:
    measuring, compiling = split_cores()
    available = os.sched_getaffinity(0)
    if len(available) == 1:
        assert (measuring, compiling) == (None, None)
    else:
        assert measuring is not None
        assert compiling is not None
        assert len(measuring) == 1
        assert not measuring & compiling
        assert measuring | compiling == available


# on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("does", "status", "detail", "processes"),
    [
        ("fault", "crashed", "illegal memory access", 2),
        ("hang", "crashed", "took longer than 10 s", 2),
        pytest.param("memory", "skipped", "out of memory", 1, marks=pytest.mark.alone),  # it asks for all the memory there is
    ],
)
def test_worker_after_a_broken_kernel_measures_the_next_config(does: str, status: str, detail: str, processes: int) -> None:
    import broken_kernels as broken

    op = broken.OPS[0]
    with GpuWorker(GpuBench, config_timeout_s=60.0) as worker:
        task = Task(op, broken.CASE, op.variants[0])
        assert worker.measure(task, broken.Knobs("fine"), None).status == "passed"
        worker.config_timeout_s = 10.0
        trial = worker.measure(task, broken.Knobs(does), None)
        assert trial.status == status
        assert detail in trial.reason
        worker.config_timeout_s = 60.0
        again: Any = worker.measure(task, broken.Knobs("fine"), None)
        assert again.status == "passed"
        assert worker.started == processes


LIVE = """
from pathlib import Path
import broken_kernels as broken
from kerneltune import cache
from kerneltune.sweep_run import measure_live
from kerneltune.plan import Options, Selection, load_plan
from kerneltune.progress import Progress

folder = Path(%r)
(folder / "broken.yaml").write_text(
    "family: broken\\nops: [broken]\\ndefaults: {dtype: float32}\\nbench:\\n"
    "  - {name: first, N: 65536}\\n  - {name: second, N: 131072}\\n"
)
selection = Selection(str(folder / "broken.yaml"), variants=("optimized", "faulty"))
cache.use_root(folder)
options = Options(results=folder)
for row in measure_live(load_plan({"broken": broken.OPS[0]}, selection, options), Progress(), "test"):
    print(row.case, row.variant, row.status, "illegal memory access" in row.reason)
"""


WAITS = """
import torch

from kerneltune.measuring.rounds import POLICIES, Contender


def waits(_number):
    return torch.ones(4, device="cuda").sum().item()


assert Contender(waits, 1, POLICIES["eager"]).sample_us() > 0
try:
    Contender(waits, 1, POLICIES["hot"])
except RuntimeError as error:
    print(error)
torch.cuda.manual_seed(1)
first = torch.randn(4, device="cuda")
try:
    Contender(waits, 1, POLICIES["hot"])
except RuntimeError:
    assert Contender(lambda _: torch.randn(4, device="cuda"), 1, POLICIES["hot"]).sample_us() > 0
torch.cuda.manual_seed(1)
assert torch.equal(first, torch.randn(4, device="cuda"))
print("numbers are drawn")
"""


@pytest.mark.gpu
def test_call_that_waits_for_the_gpu_is_timed_under_the_eager_policy_alone(tmp_path: Path) -> None:
    """Run in a process of its own: if the test fails, torch's generator of the GPU may draw no numbers for other tests."""
    file = tmp_path / "waits.py"
    file.write_text(WAITS)
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, env=environment(), timeout=300)
    assert done.stdout.startswith("waits.py:8: no CUDA graph can hold it, "), done.stderr
    assert done.stdout.endswith("\nnumbers are drawn\n"), done.stderr


@pytest.mark.gpu
def test_compare_of_a_variant_that_faults_fails_only_its_rows(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIVE % str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=800)
    rows = [f"{case} {row}" for case in ("first", "second") for row in ("optimized passed False", "faulty failed True")]
    assert done.stdout.splitlines() == rows, done.stderr


@pytest.mark.gpu
def test_worker_check_of_a_faulty_variant_fails() -> None:
    import broken_kernels as broken

    op = broken.OPS[0]
    with GpuWorker() as worker:
        outcomes = [worker.check(Task(op, broken.CASE, op.variants[0]), broken.Knobs(does)) for does in ("fine", "fault", "fine")]
    assert outcomes[0] == outcomes[2] == Outcome("checked")
    assert outcomes[1].status == "failed"
    assert "illegal memory access" in outcomes[1].reason


class Late:
    """Answers behind the end of whoever asks."""

    def work(self) -> str:
        return "done"


@pytest.mark.parametrize("requests", [[], [("work", ())]])
def test_process_whose_parent_has_closed_the_pipe_ends_without_an_error(requests: list[object]) -> None:
    parent, child = multiprocessing.Pipe()
    for request in requests:
        parent.send(request)
    parent.close()
    _serve(child, Late, str)
