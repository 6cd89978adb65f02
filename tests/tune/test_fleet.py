"""Tuning on several GPUs: made-up GPUs."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import fleet_jobs
import pytest
from fake_gpu import entries_of
from fake_operator import H200
from fleet_jobs import DEADLY, DIE, HELD, LOG, STOPPED, TOGETHER, WORKS
from subprocesses import TESTS, environment, interrupted_stops, running, wait_for

from kerneltune import cache, device, ops
from kerneltune.plan import Options, Selection, load_plan
from kerneltune.processes.start import WorkerStoppedError
from kerneltune.progress import Progress
from kerneltune.search.loop import SearchLimits
from kerneltune.search.trials import history
from kerneltune.task import trials_file
from kerneltune.tune.fleet import Fleet, share_of_cores, visible_gpus
from kerneltune.tune.run import run_tune


class Spoken(Progress):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "die").mkdir()
    monkeypatch.setenv(DIE, str(tmp_path / "die"))
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    monkeypatch.setattr(device, "current", lambda: H200)
    cache.clear()
    yield tmp_path / "log"
    cache.clear()


@pytest.fixture
def options(tmp_path: Path) -> Options:
    cache.use_root(tmp_path / "configs")
    return Options(results=tmp_path / "results", search=SearchLimits())


def fleet_of(gpus: list[str], options: Options, progress: Progress | None = None) -> Fleet:
    return Fleet(gpus, options, progress or Progress(), fleet_jobs.fake_session)


def evaluations(log: Path) -> list[tuple[str, str, str]]:
    """Return (case, config, process) of every evaluation that ended."""
    rows = [line.split() for line in log.read_text().splitlines()]
    return [(case, f"{block} {warps}", pid) for case, block, warps, pid in rows]


def test_fleet_of_two_gpus_divides_cases_and_shares_folders(
    options: Options, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "together").mkdir()
    monkeypatch.setenv(TOGETHER, str(tmp_path / "together"))
    run = fleet_of(["0", "1"], options, progress := Spoken())
    run.run(WORKS)
    done = evaluations(log)
    assert Counter(case for case, *_ in done) == {work.case.name: 20 for work in WORKS}
    assert len({pid for *_, pid in done}) == 2
    assert len({pid for case, _, pid in done if case == "m8"}) == 1
    entries = cache.load_strict(tmp_path / "configs" / "nvidia_h200" / "fake.json")
    assert {e.case.name: e.config for e in entries} == {work.case.name: {"block": 3, "warps": 8} for work in WORKS}
    rows = history(trials_file(tmp_path / "results", "nvidia_h200", "fake"))
    assert Counter(trial.key.case["M"] for trial in rows) == {work.case["M"]: 20 for work in WORKS}
    assert progress.notes == []
    run = fleet_of(["0"], options)
    run.run(WORKS[:2])
    assert len(evaluations(log)) == 100  # nothing is measured twice


def test_fleet_process_that_dies_loses_one_evaluation(options: Options, log: Path, tmp_path: Path) -> None:
    (tmp_path / "die" / "m16").touch()
    run = fleet_of(["0", "1"], options, progress := Spoken())
    run.run(WORKS)
    done = evaluations(log)
    assert Counter((case, config) for case, config, _ in done) == {
        (work.case.name, f"{block} {warps}"): 1 for work in WORKS for block in range(5) for warps in (1, 2, 4, 8)
    }
    (dead,) = (tmp_path / "die").glob("*.dead")
    assert {pid for case, config, pid in done if (case, config) == ("m16", "3 8")} - {dead.stem}
    (note,) = progress.notes
    assert note in ("GPU 0: the process died: exit code 9", "GPU 1: the process died: exit code 9")
    assert {entry.case.name for entry in entries_of(run.finished)} == {work.case.name for work in WORKS}


@pytest.mark.parametrize("when", ["starting", "measuring"])
def test_fleet_after_an_interrupt_leaves_no_process_and_continues(when: str, options: Options, log: Path, tmp_path: Path) -> None:
    """Send Ctrl-C as a terminal does, to all processes at once, while the first process starts or after some evaluations."""
    log.touch()
    with (tmp_path / "said").open("w") as errors:
        command = [sys.executable, str(TESTS / "fleet_jobs.py"), str(tmp_path)]
        process = subprocess.Popen(command, env=environment(**{HELD: "10"}), stderr=errors, start_new_session=True)
    try:
        wait_for(lambda: (tmp_path / "began").exists() and len(running(process.pid)) > 1)
        wait_for(lambda: when == "starting" or len(evaluations(log)) > 9)
        time.sleep(0.3 if when == "starting" else 0.0)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=240) == 130
        wait_for(lambda: not running(process.pid))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert (tmp_path / "said").read_text() == ""
    if when == "measuring":
        path = trials_file(tmp_path / "results", "nvidia_h200", "fake")
        kept = [(f"m{trial.key.case['M']}", *dict(trial.knobs).values()) for trial in history(path)]
        before = len(evaluations(log))
        run = fleet_of(["0", "1"], options)
        run.run(WORKS)
        again = {(case, *map(int, config.split())) for case, config, _ in evaluations(log)[before:]}
        assert 0 < len(set(kept)) == len(kept)
        assert not again & set(kept)
        assert len(again | set(kept)) == 100


def test_fleet_after_a_second_interrupt_leaves_no_process(options: Options, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(Progress):
        def advance(self, text: str, work: int = 1) -> None:
            raise KeyboardInterrupt

    stopped = interrupted_stops(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        fleet_of(["0", "1"], options, Interrupted()).run(WORKS)
    assert len(stopped) == 2


def test_fleet_gives_up_a_case_that_kills_three_processes(
    options: Options, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEADLY, "m8")
    run = fleet_of(["0", "1"], options, progress := Spoken())
    run.run(WORKS[:2])
    (reason,) = (result.reason for result in run.finished if result.status == "failed")
    assert reason.startswith("not tuned: fake optimized m8 bfloat16 none: 3 processes died over it, the last: ")
    assert [entry.case.name for entry in entries_of(run.finished)] == ["m16"]
    assert sum("died" in note for note in progress.notes) == 4


def test_fleet_of_one_gpu_tunes_cases_behind_one_that_kills_processes(
    options: Options, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEADLY, "m8")
    run = fleet_of(["0"], options)
    run.run(WORKS)
    assert [entry.case.name for entry in entries_of(run.finished)] == ["m16", "m32", "m64", "m128"]
    assert [result.reason.partition(":")[0] for result in run.finished if result.status == "failed"] == ["not tuned"]


@pytest.mark.parametrize("folder", ["configs", "results"])
def test_fleet_ends_if_a_folder_cannot_be_written(folder: str, options: Options, log: Path, tmp_path: Path) -> None:
    (tmp_path / folder).touch()
    run = fleet_of(["0", "1"], options, progress := Spoken())
    with pytest.raises(ValueError, match=rf"^cannot write {tmp_path}/{folder}/"):
        run.run(WORKS)
    assert len({case for case, *_ in evaluations(log)}) <= 2, "a task for each GPU at most"
    assert (run.finished, progress.notes) == ([], [])


@pytest.mark.parametrize("who", ["its GPU worker", "the process"])
def test_fleet_ends_if_a_process_is_sent_sigterm(who: str, options: Options, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOPPED, f"m8 {who}")
    log.touch()
    run = fleet_of(["0", "1"], options, progress := Spoken())
    with pytest.raises(WorkerStoppedError, match=r"was ended from outside: exit code -15$"):
        run.run(WORKS)
    assert "m8" not in {case for case, *_ in evaluations(log)}
    assert (progress.notes, [result for result in run.finished if result.status == "failed"]) == ([], [])


def test_fleet_fails_only_the_task_whose_code_raises(options: Options, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STOPPED, "m8 its code")
    run = fleet_of(["0", "1"], options)
    run.run(WORKS[:3])
    (reason,) = [result.reason for result in run.finished if result.status == "failed"]
    assert re.fullmatch(r"not tuned: fake optimized m8 bfloat16 none: \w+\.py:\d+: OSError: no table of shapes", reason)
    assert {entry.case.name for entry in entries_of(run.finished)} == {"m16", "m32"}


def test_fleet_leaves_out_a_gpu_of_another_model(options: Options, log: Path) -> None:
    run = Fleet(["0", "1"], options, progress := Spoken(), fleet_jobs.odd)
    run.run(WORKS)
    assert len({pid for *_, pid in evaluations(log)}) == 1
    assert len(run.finished) == len(WORKS)
    left_out = [note for note in progress.notes if "left out" in note]
    assert not progress.notes or left_out == ["left out: GPU 1 is NVIDIA A100, expected NVIDIA H200"]


def test_fleet_without_a_gpu_raises(options: Options, log: Path) -> None:
    with pytest.raises(ValueError, match=r"^no GPU is left: GPU  is interpreter, expected NVIDIA H200$"):
        Fleet([""], options, Progress()).run(WORKS)


def test_visible_gpus_beyond_those_present_raises_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^gpus: '3': expected all or a number of GPUs, 2 here$"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        visible_gpus("3")
    assert (visible_gpus("all"), visible_gpus("1")) == (["0", "1"], ["0"])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)  # torch does not count again after its first use of a GPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=r"^gpus: 'all': expected all or a number of GPUs, 0 here$"):
        visible_gpus("all")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus("all") == ["0", "1"]
    with pytest.raises(ValueError, match=r"^gpus: 'many': expected all or a number of GPUs, 2 here$"):
        visible_gpus("many")


def test_share_of_cores_divides_cores_among_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [share_of_cores(i, 3) for i in range(3)] == [{0, 1}, {2, 3, 4}, {5, 6, 7}]
    assert share_of_cores(0, 9) is None


@pytest.mark.gpu
@pytest.mark.alone
def test_fleet_tunes_on_the_gpu_of_this_host(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(
        "family: tiny\nops: [stream]\ndefaults: {dtype: int32}\nbench:\n  - {name: big, read: 67108864, write: 67108864}\n"
    )
    cache.use_root(tmp_path / "configs")
    options = Options(results=tmp_path / "results", gpus="1")
    progress = Spoken()
    (entry,) = entries_of(run_tune(load_plan(ops.load(), Selection(str(tmp_path / "tiny.yaml")), options), progress))
    assert entry.evidence["time_us"] <= 1.05 * entry.evidence["default_us"]
    assert entries_of(run_tune(load_plan(ops.load(), Selection(str(tmp_path / "tiny.yaml")), options), progress)) == []
