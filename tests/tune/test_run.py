"""The tuning stage as it is on a GPU, with a made-up bench in the place of the GPU and a pool that compiles nothing."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import fake_gpu
import fake_operator
import pytest
from fake_gpu import H200, OPS, Bench, Pool, entries_of, time_us
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from kerneltune import cache
from kerneltune.measuring.compiler import CompileResult
from kerneltune.ops.stream import StreamConfig
from kerneltune.plan import Options, Selection, load_plan
from kerneltune.processes.start import WorkerStoppedError
from kerneltune.processes.worker import WorkerCrashedError
from kerneltune.progress import Progress
from kerneltune.search.loop import SearchLimits
from kerneltune.search.trials import history
from kerneltune.spec import Case, Op
from kerneltune.task import Run, Task, trials_file
from kerneltune.tune.run import renew_configs, run_tune
from kerneltune.tune.tuner import Tuner

SWEEP = """
family: tiny
ops: [stream]
defaults: {dtype: int32}
bench:
  - {name: big, read: 1048576, write: 1048576}
"""


class Spoken(Progress):
    """Keeps the notes."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fake_gpu.stands_in(monkeypatch):
        yield


@pytest.fixture
def selection(tmp_path: Path) -> Selection:
    (tmp_path / "tiny.yaml").write_text(SWEEP)
    return Selection(str(tmp_path / "tiny.yaml"))


def _appended(path: Path) -> list[str]:
    """Return the knobs of every trial in a journal, in the order of the file."""
    storage = JournalStorage(JournalFileBackend(str(path)))
    numbers = [storage.get_study_id_from_name(study.study_name) for study in storage.get_all_studies()]
    return [json.dumps(trial.params) for number in numbers for trial in storage.get_all_trials(number)]


def test_run_tune_stores_the_best_config_and_every_trial(selection: Selection, options: Options) -> None:
    (entry,) = entries_of(run_tune(load_plan(OPS, selection, options), Progress()))
    assert entry.config == {"block": 2048, "warps": 8, "ctas": 0}
    assert options.results is not None
    path = trials_file(options.results, "nvidia_h200", "stream")
    trials = history(path)
    assert len({trial.knobs for trial in trials}) == len(trials) == entry.evidence["trials"]
    first = trials[0].evaluation
    assert (first.program_registers, first.shared_bytes) == (128, 1024)
    assert first.date
    assert first.commit
    assert entries_of(run_tune(load_plan(OPS, selection, options), Progress())) == []  # nothing is lacking


def test_run_tune_continues_after_a_config_that_crashes(
    selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "crashed", staticmethod(lambda config: config.block == 2048))
    (entry,) = entries_of(run_tune(load_plan(OPS, selection, options), Progress()))
    assert entry.config["block"] in (1024, 4096)
    assert entry.evidence["trials"] > 4


@pytest.mark.parametrize("where", ["bench", "compiler"])
def test_run_tune_forced_tries_crashed_configs_again(
    where: str, selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(self: Pool, run: Any) -> "Future[CompileResult]":
        return (
            self.done(CompileResult((), "compiling took longer than 90 s", crashed=True))
            if run.config.block == 2048
            else self.done()
        )

    with monkeypatch.context() as moment:
        if where == "bench":
            moment.setattr(Bench, "crashed", staticmethod(lambda config: config.block == 2048))
        else:
            moment.setattr(Pool, "submit", submit)
        (entry,) = entries_of(run_tune(load_plan(OPS, selection, options), Progress()))
        assert entry.config["block"] != 2048
    forced = replace(options, retune="all")
    (entry,) = entries_of(run_tune(load_plan(OPS, selection, forced), Progress()))
    assert entry.config == {"block": 2048, "warps": 8, "ctas": 0}
    assert options.results is not None
    path = trials_file(options.results, "nvidia_h200", "stream")
    kept = _appended(path)
    rows = Counter(kept)
    assert {json.loads(config)["block"] for config, count in rows.items() if count == 2} == {2048}
    assert max(rows.values()) == 2
    run_tune(load_plan(OPS, selection, forced), Progress())
    assert _appended(path) == kept  # nothing is left to be tried again


@pytest.mark.parametrize(("asked", "tried"), [({}, 17), ({"retune": "all"}, 40)])
def test_run_tune_forced_searches_the_whole_space(
    asked: dict[str, Any], tried: int, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a search tries the sixteen best of the other 16-bit type, where that was searched, and the default."""
    monkeypatch.setattr("kerneltune.tune.session.GpuWorker", fake_operator.Bench)
    variant = replace(fake_operator.VARIANT, space=lambda _: {"block": tuple(range(10)), "warps": (1, 2, 4, 8)})
    operators = {"fake": replace(fake_operator.OP, dtypes=("bfloat16", "float16"), variants=(variant,))}
    sweep = "family: made\nops: [fake]\nbench:\n  - {name: m8, M: 8, dtype: [bfloat16, float16]}\n"
    (tmp_path / "made.yaml").write_text(sweep)
    first, second = (Selection(str(tmp_path / "made.yaml"), dtypes=(dtype,)) for dtype in ("bfloat16", "float16"))
    whole = replace(options, search=SearchLimits())
    run_tune(load_plan(operators, first, whole), Progress())
    (entry,) = entries_of(run_tune(load_plan(operators, second, replace(whole, **asked)), Progress()))
    assert entry.evidence["trials"] == tried


def test_run_tune_stops_where_less_than_1_percent_is_expected(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kerneltune.tune.session.GpuWorker", fake_operator.Bench)
    variant = replace(fake_operator.VARIANT, space=lambda _: {"block": tuple(range(10)), "warps": (1, 2, 4, 8)})
    (tmp_path / "made.yaml").write_text("family: made\nops: [fake]\nbench:\n  - {name: m8, M: 8, dtype: bfloat16}\n")
    selection, operators = Selection(str(tmp_path / "made.yaml")), {"fake": replace(fake_operator.OP, variants=(variant,))}
    (entry,) = entries_of(run_tune(load_plan(operators, selection, options), Progress()))
    assert 16 <= entry.evidence["trials"] < 40
    assert entry.config == {"block": 3, "warps": 8}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (WorkerCrashedError("MemoryError: inputs do not fit"), "MemoryError: inputs do not fit"),
        (TypeError("no axis of this name"), "TypeError: no axis of this name"),  # of the operator's own code
    ],
)
def test_run_tune_of_a_case_that_cannot_be_measured_notes_it_as_failed(
    error: Exception, text: str, selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []

    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(Bench, "measure", fails)
    tuned = run_tune(load_plan(OPS, selection, options), Spoken(notes))
    assert [result.status for result in tuned] == ["failed"]
    assert re.sub(r"test_run\.py:\d+: ", "", notes[0]) == f"not tuned: stream baseline big int32 none: {text}"


def test_run_tune_ends_if_the_gpu_worker_is_stopped(
    selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object) -> None:
        raise WorkerStoppedError("the GPU worker was ended from outside: exit code -15")

    monkeypatch.setattr(Bench, "measure", ended)
    with pytest.raises(WorkerStoppedError, match=r"^the GPU worker was ended from outside: exit code -15$"):
        run_tune(load_plan(OPS, selection, options), Progress())


@pytest.mark.parametrize("folder", ["configs", "results"])
def test_run_tune_ends_at_the_first_task_if_a_folder_cannot_be_written(folder: str, options: Options, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(SWEEP + "  - {name: twice, read: 2097152, write: 2097152}\n")
    (tmp_path / folder).touch()
    notes: list[str] = []
    plan = load_plan(OPS, Selection(str(tmp_path / "two.yaml")), options)
    with pytest.raises(ValueError, match=rf"^cannot write {tmp_path}/{folder}/"):
        run_tune(plan, Spoken(notes))
    assert notes == []


def test_run_tune_with_a_damaged_journal_ends_before_it_measures(
    selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = trials_file(options.results, "nvidia_h200", "stream")
    path.parent.mkdir(parents=True)
    path.write_text('{"op_code": 0}\nno trial\n')
    monkeypatch.setattr(Bench, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match=rf"^{path}:2: not a trial: 'no trial'; move the file away to start anew$"):
        run_tune(load_plan(OPS, selection, options), Progress())


def test_run_tune_does_not_blame_a_task_for_the_error_of_a_later_task(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The candidates of the later task are made while the first task is searched."""
    candidates = Tuner.first_runs

    def raising(tuner: Tuner) -> Iterator[Run]:
        if tuner.task.case.name == "twice":
            raise TypeError("no axis of this name")
        return candidates(tuner)

    monkeypatch.setattr(Tuner, "first_runs", raising)
    (tmp_path / "two.yaml").write_text(SWEEP + "  - {name: twice, read: 2097152, write: 2097152}\n")
    tuned = run_tune(load_plan(OPS, Selection(str(tmp_path / "two.yaml")), options), Progress())
    assert [result.status for result in tuned] == ["tuned", "tuned"]


def test_run_tune_of_a_case_too_large_for_the_gpu_notes_it_without_failure(
    selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    monkeypatch.setattr("kerneltune.tune.session.why_not_timed", lambda *_: "needs 200 GB")
    tuned = run_tune(load_plan(OPS, selection, options), Spoken(notes))
    assert [result.status for result in tuned] == ["skipped"]
    assert notes == ["not tuned: stream big: needs 200 GB"]


def test_run_tune_with_a_broken_config_file_raises_before_it_measures(
    selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache.path_of("stream", H200.slug)
    path.parent.mkdir(parents=True)
    path.write_text('{"schema": 7}')
    monkeypatch.setattr(Bench, "measure", lambda *_: pytest.fail("measured"))
    for changes in ({}, {"retune": "all"}, {"retune": "stale"}):
        with pytest.raises(ValueError, match=f"^{path}: schema: 7: expected 1$"):
            run_tune(load_plan(OPS, selection, replace(options, **changes)), Progress())
    assert path.read_text() == '{"schema": 7}'


def test_run_tune_keeps_stale_configs_unless_told_to_search_them(selection: Selection, options: Options) -> None:
    (entry,) = entries_of(run_tune(load_plan(OPS, selection, options), Progress()))
    old = replace(entry, config={"block": 512, "warps": 4, "ctas": 0}, evidence=entry.evidence | {"source_hash": "old"})
    path = cache.store(H200.slug, old)
    notes: list[str] = []
    (kept,) = run_tune(load_plan(OPS, selection, options), Spoken(notes))
    assert kept.status == "kept"
    assert cache.load_strict(path) == [old]
    assert notes == [
        "1 of 1 cached configs are stale, chosen with other code: kept (`sweep --stale` times them beside their default)"
    ]
    cache.store(H200.slug, replace(entry, evidence=entry.evidence | {"driver": "old"}))
    assert [result.status for result in run_tune(load_plan(OPS, selection, options), Spoken(notes))] == ["kept"]
    assert notes.pop() == (
        "1 of 1 cached configs are outdated, chosen with another driver, torch or triton: kept (`tune --stale` searches again)"
    )
    cache.store(H200.slug, old)
    (again,) = entries_of(run_tune(load_plan(OPS, selection, replace(options, retune="stale")), Spoken(notes)))
    assert again.config == entry.config
    assert again.evidence["source_hash"] == OPS["stream"].variant("baseline").source_hash
    assert len(notes) == 1
    fresh = run_tune(load_plan(OPS, selection, replace(options, retune="stale")), Progress())
    assert [result.status for result in fresh] == ["kept"]


def test_run_tune_compiles_for_the_next_case_while_it_measures(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = SWEEP + "  - {name: twice, read: 2097152, write: 2097152}\n"
    (tmp_path / "two.yaml").write_text(two)
    happened: list[tuple[str, int]] = []
    begun = Event()

    def submit(self: Pool, run: Any) -> "Future[CompileResult]":
        assert begun.wait(10)
        happened.append(("compile", run.task.case["read"]))
        return Pool().done()

    def prepare(_self: Bench, task: Task) -> None:
        happened.append(("prepare", task.case["read"]))
        begun.set()

    monkeypatch.setattr(Pool, "submit", submit)
    monkeypatch.setattr(Bench, "prepare", prepare)
    _first, second = entries_of(run_tune(load_plan(OPS, Selection(str(tmp_path / "two.yaml")), options), Progress()))
    assert happened[0] == ("prepare", 1 << 20)
    assert happened.index(("compile", 2 << 20)) < happened.index(("prepare", 2 << 20))
    assert sum(size == 2 << 20 for what, size in happened if what == "compile") == second.evidence["trials"]  # none twice


def test_renewal_times_stale_entries_of_this_gpu_again(
    selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = entries_of(run_tune(load_plan(OPS, selection, options), Progress()))
    prepared: list[Case] = []
    monkeypatch.setattr(Bench, "prepare", lambda _self, task: prepared.append(task.case))

    def renewed_as(until: float = math.inf, **changes: Any) -> list[tuple[bool, str]]:
        stale, limited = [replace(entry, **changes)], replace(options, search=replace(options.search, until=until))
        return [
            (result.entry is not None and result.entry.config == before.config, result.reason)
            for before, result in renew_configs(OPS, limited, stale, Progress())
        ]

    def stored() -> cache.CacheEntry:
        (there,) = cache.load_strict(cache.path_of("stream", "nvidia_h200"))
        return there

    old = entry.evidence | {"source_hash": "old", "same_code": {"source_hash": "older"}, "time_us": 99.0}
    assert renewed_as(evidence=old, until=0.0) == []
    assert stored() == entry
    assert renewed_as(evidence=old) == [(True, "")]
    renewed = stored()
    assert renewed.config == entry.config
    assert renewed.evidence.keys() == entry.evidence.keys()
    same = ("time_us", "default_us", "trials", "source_hash", "driver", "triton")
    assert {name: renewed.evidence[name] for name in same} == {name: entry.evidence[name] for name in same}
    assert (
        renewed.evidence["over_default"] == [round(time_us(OPS["stream"].variants[0].default_config(prepared[0])) / 10.0, 4)] * 2
    )
    slow = {"block": 4096, "warps": 8, "ctas": 8}
    assert renewed_as(evidence=old, config=slow) == [(False, "")]
    default = OPS["stream"].variants[0].default_config(entry.case)
    assert stored().config == {"block": default.block, "warps": default.warps, "ctas": default.ctas}
    assert stored().evidence["source_hash"] == entry.evidence["source_hash"]
    assert len(prepared) == 2  # once for each that was timed
    ((is_kept, failure),) = renewed_as(config={"odd": 1})
    assert (is_kept, len(prepared)) == (False, 2)
    assert "odd" in failure
    assert "gone" in renewed_as(variant="gone")[0][1]


def test_renewal_with_a_damaged_journal_ends_before_it_measures(
    selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    (entry,) = entries_of(run_tune(load_plan(OPS, selection, options), Progress()))
    path = trials_file(options.results, "nvidia_h200", "stream")
    path.write_text('{"op_code": 0}\nno trial\n')
    monkeypatch.setattr(Bench, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(ValueError, match=rf"^{path}:2: not a trial: 'no trial'; move the file away to start anew$"):
        renew_configs(OPS, options, [entry], Progress())


# spaces that make no sense


def broken(**changes: Any) -> dict[str, Op]:
    op = OPS["stream"]
    return {"stream": replace(op, variants=(replace(op.variants[0], **changes),))}


def raises(*_: object) -> Any:
    raise ZeroDivisionError("warps are none")


CASE_TEXT = "read=1048576 write=1048576 int32 none"
WHERE = f"stream baseline: {CASE_TEXT}: "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({field: raises}, f"PLACE{field}: ZeroDivisionError: warps are none, for stream baseline {CASE_TEXT}")
            for field in ("invalid", "space", "default", "unsupported")
        ),
        ({"default": lambda _: 3}, f"PLACEdefault: 3: expected a StreamConfig, for stream baseline {CASE_TEXT}"),
        ({"promising": raises}, WHERE + "ZeroDivisionError: warps are none"),
        (
            {"space": lambda _: {"block": (512,), "warps": (), "ctas": (0,)}},
            f"stream baseline: no valid config for {CASE_TEXT}: warps: no value",
        ),
        ({"promising": lambda _: (3,)}, WHERE + "promising: 3: expected a StreamConfig"),
        (
            {"default": lambda _: StreamConfig(512, 3, 0), "invalid": lambda _, c: None if c.warps == 3 else f"{c.warps} warps"},
            f"stream baseline: no valid config for {CASE_TEXT}: 4 warps (8 of 16 configs)",
        ),
    ],
)
def test_run_tune_of_an_invalid_space_raises_one_line_and_writes_nothing(
    changes: dict[str, Any], message: str, selection: Selection, options: Options, tmp_path: Path
) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError) as caught:
        run_tune(load_plan(broken(**changes), selection, options), Progress())
    assert re.sub(r"^test_run\.py:\d+: ", "PLACE", str(caught.value)) == message
    assert sorted(tmp_path.rglob("*")) == before
