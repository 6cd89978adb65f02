"""Tuning on several GPUs: made-up workers in processes of their own, and on a Ray cluster of this machine."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import MagicMock

import fleet_jobs
import pytest
from fleet_jobs import DIE, LOG, WORKS
from started import TESTS, environment, running, wait_for
from versus_jobs import H200, OP, VARIANT, Knobs

from kerneltune import cache, device, ops
from kerneltune.run_options import Options, Quiet, Selection
from kerneltune.search import trial_table
from kerneltune.search.task import Evaluation, Task
from kerneltune.search.trials import TrialStore, history
from kerneltune.tune import cluster, fleet
from kerneltune.tune.cluster import RayWorkers
from kerneltune.tune.fleet import Fleet, make_workers, run_tune
from kerneltune.tune.worker import LocalWorkers, Worker, share_of_cores, visible_gpus


class Spoken(Quiet):
    """Remembers what is worth a line."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "die").mkdir()
    monkeypatch.setenv(DIE, str(tmp_path / "die"))
    monkeypatch.setenv(LOG, str(tmp_path / "log"))
    monkeypatch.setattr(device, "current", lambda: device.NO_GPU)  # that of the driver; the workers' is made up
    cache.clear()
    yield tmp_path / "log"
    cache.clear()


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(results=tmp_path / "results", configs=tmp_path / "configs", until_gain=0.0)


def two(options: Options) -> LocalWorkers:
    return LocalWorkers("made", options, ["0", "1"], fleet_jobs.worker)


def one(options: Options) -> LocalWorkers:
    return LocalWorkers("made", options, ["0"], fleet_jobs.worker)


def evaluations(log: Path) -> list[tuple[str, str, str]]:
    """(case, config, process) of every evaluation that ended."""
    rows = [line.split() for line in log.read_text().splitlines()]
    return [(case, f"{block} {warps}", pid) for case, block, warps, pid in rows]


def wanted(works: list[Task]) -> Callable[[str], list[Task]]:
    def of(slug: str) -> list[Task]:
        assert slug == "nvidia_h200"
        return works

    return of


def test_two_workers_share_the_cases_and_everything_ends_up_here(options: Options, log: Path, tmp_path: Path) -> None:
    with two(options) as workers:
        run = Fleet(workers, options, progress := Spoken())
        usage = run.run(wanted(WORKS))
    done = evaluations(log)
    assert Counter(case for case, *_ in done) == {work.case.name: 20 for work in WORKS}
    assert len({pid for *_, pid in done}) == 2
    assert len({pid for case, _, pid in done if case == "m8"}) == 1
    entries = cache.load_strict(tmp_path / "configs" / "nvidia_h200" / "fake.json")
    assert {e.case: e.config for e in entries} == {work.case.name: {"block": 3, "warps": 8} for work in WORKS}
    rows = history(tmp_path / "results" / "runs" / "trials" / "nvidia_h200" / "fake.log")
    assert Counter(trial.key.case["M"] for trial in rows) == {work.case["M"]: 20 for work in WORKS}
    assert (usage.gpus, usage.evaluations) == (2, 100)
    assert usage.busy_s == pytest.approx(1.0)
    assert 0 <= usage.idle < 1
    assert progress.notes == []
    with one(options) as workers:
        assert Fleet(workers, options, Quiet()).run(wanted(WORKS[:2])).evaluations == 0  # nothing is measured twice
    assert len(evaluations(log)) == 100


def test_a_worker_is_told_what_was_refused_at_other_sizes(options: Options, log: Path, tmp_path: Path) -> None:
    path = tmp_path / "results" / "runs" / "trials" / "nvidia_h200" / "fake.log"
    store = TrialStore(path, source_hash=VARIANT.source_hash, driver=H200.driver, **device.versions())
    likely = [Knobs(3, 8), Knobs(4, 8)]
    for config in VARIANT.configs(WORKS[2].case):
        found = Evaluation("spills") if config in likely else Evaluation("ok", 10.0)
        store.put(Task(OP, WORKS[2].case, VARIANT), config, found)
    with one(options) as workers:
        Fleet(workers, options, Quiet()).run(wanted(WORKS[1:2]))
    asked = [config for case, config, _ in evaluations(log) if case == "m16"]
    assert len(asked) == 20
    assert asked[0] == "0 1"
    assert asked[-2:] == ["3 8", "4 8"]


def test_a_worker_that_dies_costs_one_evaluation_and_its_case_goes_on(options: Options, log: Path, tmp_path: Path) -> None:
    (tmp_path / "die" / "m16").touch()
    with two(options) as workers:
        run = Fleet(workers, options, progress := Spoken())
        run.run(wanted(WORKS))
    done = evaluations(log)
    assert Counter((case, config) for case, config, _ in done) == {
        (work.case.name, f"{block} {warps}"): 1 for work in WORKS for block in range(5) for warps in (1, 2, 4, 8)
    }
    (dead,) = (tmp_path / "die").glob("*.dead")
    assert {pid for case, config, pid in done if (case, config) == ("m16", "3 8")} - {dead.stem}
    (note,) = progress.notes
    assert note in ("worker 0 died: exit code 9", "worker 1 died: exit code 9")
    assert {done.entry.case for _, done in run.finished if done.entry} == {work.case.name for work in WORKS}


def begin_and_be_killed(options: Options) -> None:
    with Worker("made", options, None):
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_folder_of_a_killed_worker_is_removed_by_the_next(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = multiprocessing.get_context("fork").Process(target=begin_and_be_killed, args=(options,))
    killed.start()
    killed.join(20)
    (left,) = tmp_path.iterdir()
    with Worker("made", options, None):
        assert len(list(tmp_path.iterdir())) == 1
        assert not left.exists()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("when", ["starting", "measuring"])
def test_an_interrupted_run_leaves_no_worker_and_goes_on(when: str, options: Options, log: Path, tmp_path: Path) -> None:
    """Ctrl-C as a terminal sends it, to all processes at once, while the first worker is started or after some evaluations."""
    log.touch()
    with (tmp_path / "said").open("w") as said:
        command = [sys.executable, str(TESTS / "fleet_jobs.py"), str(tmp_path)]
        process = subprocess.Popen(command, env=environment(), stderr=said, start_new_session=True)
    try:
        wait_for(lambda: (tmp_path / "began").exists() and len(running(process.pid)) > 1)
        wait_for(lambda: when == "starting" or len(evaluations(log)) > 9)
        time.sleep(0.3 if when == "starting" else 0.0)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=30) == 130
        wait_for(lambda: not running(process.pid))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert (tmp_path / "said").read_text() == ""
    if when == "measuring":
        path = tmp_path / "results" / "runs" / "trials" / "nvidia_h200" / "fake.log"
        kept = [(f"m{trial.key.case['M']}", *dict(trial.knobs).values()) for trial in history(path)]
        before = len(evaluations(log))
        with two(options) as workers:
            Fleet(workers, options, Quiet()).run(wanted(WORKS))
        again = {(case, *map(int, config.split())) for case, config, _ in evaluations(log)[before:]}
        assert 0 < len(set(kept)) == len(kept)
        assert not again & set(kept)
        assert len(again | set(kept)) == 100


class Deadly(LocalWorkers):
    """Every worker dies of the case m8, again and again."""

    def give(self, index: int, order: object) -> None:
        (Path(self.folder) / "m8").touch()
        super().give(index, order)  # type: ignore[arg-type]

    folder = ""


def test_a_case_that_kills_every_worker_is_given_up_and_the_rest_is_done(options: Options, log: Path, tmp_path: Path) -> None:
    Deadly.folder = str(tmp_path / "die")
    with Deadly("made", options, ["0", "1"], fleet_jobs.worker) as workers:
        run = Fleet(workers, options, progress := Spoken())
        run.run(wanted(WORKS[:2]))
    problems = [done.problem for _, done in run.finished if done.problem]
    assert problems == ["not tuned: fake optimized m8 bfloat16 none: 3 workers died over it, the last: exit code 9"]
    assert [done.entry.case for _, done in run.finished if done.entry] == ["m16"]
    assert sum("died" in note for note in progress.notes) == 4


def test_a_worker_with_another_gpu_is_left_out(options: Options, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: H200)  # that of the driver
    with LocalWorkers("made", options, ["0", "1"], fleet_jobs.odd_worker) as workers:
        run = Fleet(workers, options, progress := Spoken())
        run.run(wanted(WORKS))
    assert len({pid for *_, pid in evaluations(log)}) == 1
    assert len(run.finished) == len(WORKS)
    left_out = [note for note in progress.notes if "left out" in note]
    assert not progress.notes or left_out[0].startswith("worker 1 left out: NVIDIA A100, driver 580, torch ")


def test_workers_without_a_gpu_are_of_no_use(options: Options) -> None:
    with (
        LocalWorkers("made", options, [""], Worker) as workers,
        pytest.raises(ValueError, match=r"^no worker is left: interpreter, driver none, .*: no GPU$"),
    ):
        Fleet(workers, options, Quiet()).run(wanted(WORKS))


def test_whole_spaces_come_back(log: Path, tmp_path: Path) -> None:
    options = Options(results=tmp_path / "results", configs=tmp_path / "configs", exhaustive=True)
    with one(options) as workers:
        run = Fleet(workers, options, Quiet())
        run.run(wanted(WORKS[:2]))
    spaces = trial_table.read(trial_table.table_path(tmp_path / "results", "nvidia_h200", "fake"))
    assert sorted(space.case.name for space in spaces) == sorted(work.case.name for work in WORKS[:2])
    assert [len(space.trials) for space in spaces] == [20, 20]
    assert not (tmp_path / "configs").exists()


def test_a_host_without_a_gpu_hears_whose_configs_it_has(
    options: Options, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "made.yaml").write_text("family: made\nops: [fake]\ndefaults: {dtype: bfloat16}\nbench:\n  - {name: m8, M: 8}\n")
    monkeypatch.setattr(fleet, "make_workers", lambda _family, options: one(options))
    there = replace(options, ray="elsewhere:1")
    tuned = run_tune({"fake": OP}, Selection(str(tmp_path / "made.yaml")), there, Quiet())
    assert device.current().slug == "interpreter"
    assert tuned.device_slug == "nvidia_h200"
    assert [entry.config for entry in tuned.entries] == [{"block": 3, "warps": 8}]
    assert (tmp_path / "results" / "runs" / "trials" / tuned.device_slug / "fake.log").is_file()


def test_a_ray_cluster_does_the_same(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # for the workers, which unpickle what is in these modules
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    (tmp_path / "die" / "m16").touch()
    options = Options(results=tmp_path / "results", configs=tmp_path / "configs", ray="local")
    with RayWorkers("made", options, 2, fleet_jobs.worker, gpus_each=0) as workers:
        run = Fleet(workers, options, progress := Spoken())
        usage = run.run(wanted(WORKS[:4]))
    done = evaluations(log)
    assert usage.evaluations == len(done) == 80
    assert len({pid for *_, pid in done}) >= 2
    entries = cache.load_strict(tmp_path / "configs" / "nvidia_h200" / "fake.json")
    assert {e.case: e.config for e in entries} == {work.case.name: {"block": 3, "warps": 8} for work in WORKS[:4]}
    assert len(progress.notes) == 1
    assert progress.notes[0].startswith(("worker 0 died", "worker 1 died"))


def test_a_case_goes_on_where_a_gpu_is_left_and_a_cluster_without_one_is_one_line(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    class Losing(RayWorkers):
        """The cluster loses a node after the second order, and the other after the third."""

        given = 0

        def give(self, index: int, order: object) -> None:
            super().give(index, order)  # type: ignore[arg-type]
            self.given += 1
            if self.given > 1 and nodes:
                made.remove_node(nodes.pop(), allow_graceful=False)

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(cluster, "_GONE_S", 1.0)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    try:
        nodes = [made.add_node(num_cpus=1, num_gpus=1) for _ in range(2)]
        options = Options(results=tmp_path / "results", configs=tmp_path / "configs", ray=made.address)
        with Losing("made", options, make=fleet_jobs.worker) as workers:
            run = Fleet(workers, options, Quiet())
            with pytest.raises(ValueError, match=r"^no worker is left: no GPU left in the cluster$"):
                run.run(wanted(WORKS))
    finally:
        made.shutdown()
    assert [done.entry is not None for _, done in run.finished] == [True] * len(run.finished)
    assert run.finished


def test_a_worker_whose_gpu_does_not_come_back_is_dead(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, of what a cluster says only: no actor is ever placed, and after a while its last GPU is gone."""
    ray = MagicMock(ObjectRef=type("ObjectRef", (), {}))
    ray.remote.return_value.options.return_value.remote.return_value.identity.remote.side_effect = ray.ObjectRef
    ray.cluster_resources.side_effect = chain([{"GPU": 1.0}] * 3, repeat({"CPU": 1.0}))
    ray.wait.return_value = [], []
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(cluster, "_GONE_S", 0.0)
    with RayWorkers("made", replace(options, ray="local")) as workers:
        run = Fleet(workers, options, progress := Spoken())
        with pytest.raises(ValueError, match=r"^no worker is left: no GPU left in the cluster$"):
            run.run(wanted(WORKS))
    assert progress.notes == ["worker 0 died: no GPU left in the cluster"] * 3
    assert ray.wait.call_count == 2 + 3


def test_what_cannot_be_reached_is_one_line(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(ValueError, match=r"^ray: '127.0.0.1:1': cannot connect: Connection refused$"):
        make_workers("made", Options(ray="127.0.0.1:1"))
    with pytest.raises(ValueError, match=r"^ray: 'nonsense': expected HOST:PORT, auto or local$"):
        make_workers("made", Options(ray="nonsense"))
    for gpus in ("many", "0"):
        with pytest.raises(ValueError, match=f"^gpus: '{gpus}': expected all or a number of GPUs$"):
            make_workers("made", Options(gpus=gpus, ray="somewhere"))


def test_every_worker_has_its_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [share_of_cores(i, 3) for i in range(3)] == [{0, 1}, {2, 3, 4}, {5, 6, 7}]
    assert share_of_cores(0, 9) is None


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_of_this_host_is_tuned_on(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(
        "family: tiny\nops: [stream]\ndefaults: {dtype: int32}\nbench:\n  - {name: big, read: 67108864, write: 67108864}\n"
    )
    options = Options(results=tmp_path / "results", configs=tmp_path / "configs", gpus="1")
    progress = Spoken()
    (entry,) = run_tune(ops.load(), Selection(str(tmp_path / "tiny.yaml")), options, progress).entries
    assert entry.evidence["time_us"] <= 1.05 * entry.evidence["default_us"]
    assert progress.notes[-1].startswith("GPU idle for ")
    assert run_tune(ops.load(), Selection(str(tmp_path / "tiny.yaml")), options, progress).entries == []
