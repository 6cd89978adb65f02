"""The trial store: stored trials are found again, whatever a kill leaves of the file."""

import errno
import fcntl
import json
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

import optuna
import pytest
from asserting import every
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from kerneltune.records import TrialStatus
from kerneltune.search.trials import TrialStore, history, newest_trials
from kerneltune.spec import Case, Op, Traffic, Variant
from kerneltune.task import Evaluation, Task


@dataclass(frozen=True, slots=True)
class Knobs:
    block: int
    fast: bool


def nothing(*_args: Any, **_kwargs: Any) -> Mapping[str, Any]:
    return {}


VARIANT = Variant("optimized", nothing, Knobs)
OTHER_VARIANT = Variant("baseline", nothing, Knobs)
OP = Op("fake", ("M",), ("bfloat16",), nothing, nothing, lambda *_: [], lambda _: Traffic(1, 1), (VARIANT,), __name__)
OTHER_OP = Op("other", ("M",), ("bfloat16",), nothing, nothing, lambda *_: [], lambda _: Traffic(1, 1), (VARIANT,), __name__)
CASE = Case("a", (("M", 8),), "bfloat16", "none", (("centered", False), ("format", "e4m3")))
FINGERPRINT = {"source_hash": "abc", "driver": "1.0"}


def open_store(path: Path, **changes: str) -> TrialStore:
    return TrialStore(path, **(FINGERPRINT | changes))


def put(store: TrialStore, config: Knobs, trial: Evaluation) -> None:
    store.put(Task(OP, CASE, VARIANT), config, trial)


def get(store: TrialStore, config: Knobs) -> Evaluation | None:
    return store.get(Task(OP, CASE, VARIANT), config)


def filled(path: Path, count: int) -> list[Knobs]:
    """Store trials of `count` configs in `path`, and return the configs; config i takes i + 0.5 µs."""
    store, configs = open_store(path), [Knobs(i, i % 2 == 0) for i in range(count)]
    for i, config in enumerate(configs):
        put(store, config, Evaluation("passed", i + 0.5))
    return configs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "trials" / "fake.log"


def test_store_returns_a_trial_as_it_was_put(path: Path) -> None:
    trials = [
        Evaluation("passed", 1 / 3),
        Evaluation("spills", None, "96 bytes per thread"),
        Evaluation("failed", None, 'y: "µ"\nline two'),
    ]
    store = open_store(path)
    assert not history(path)
    assert get(store, Knobs(0, True)) is None
    for i, trial in enumerate(trials):
        put(store, Knobs(i, True), trial)
    for reader in (store, open_store(path)):
        assert [get(reader, Knobs(i, True)) for i in range(3)] == trials


def test_stored_trial_has_the_time_of_its_measurement(path: Path) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    put(open_store(path), Knobs(1, True), Evaluation("passed", 1.0))
    stored = get(open_store(path), Knobs(1, True))
    assert stored is not None
    assert before <= datetime.fromisoformat(stored.date) <= datetime.now(UTC)


def test_date_of_a_trial_does_not_depend_on_the_time_zone_of_the_reader(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    date = "2026-11-25T01:30:00+00:00"
    with monkeypatch.context() as patch:
        for zone in ("America/New_York", "Asia/Tokyo"):
            patch.setenv("TZ", zone)
            time.tzset()
            if not path.exists():
                put(open_store(path), Knobs(1, True), Evaluation("passed", 1.0, date=date))
            (trial,) = history(path)
            assert trial.evaluation.date == date
    time.tzset()


def test_store_looks_trials_up_by_op_case_variant_policy_and_config(path: Path) -> None:
    store, config = open_store(path), Knobs(1, True)
    put(store, config, Evaluation("passed", 2.0))
    same_but_name = Case("another name", CASE.axes, CASE.dtype, CASE.quant, CASE.options)
    cases = [
        Case("a", (("M", 9),), "bfloat16", "none", CASE.options),
        Case("a", CASE.axes, "float16", "none", CASE.options),
        Case("a", CASE.axes, "bfloat16", "fp8", CASE.options),
        Case("a", CASE.axes, "bfloat16", "none", (("centered", True), ("format", "e4m3"))),
    ]
    for reader in (store, open_store(path)):
        assert reader.get(Task(OP, same_but_name, VARIANT), config) == Evaluation("passed", 2.0)
        assert [reader.get(Task(OP, case, VARIANT), config) for case in cases] == [None] * 4
        assert reader.get(Task(OTHER_OP, CASE, VARIANT), config) is None
        assert reader.get(Task(OP, CASE, OTHER_VARIANT), config) is None
        assert reader.get(Task(OP, CASE, VARIANT, "hot"), config) is None
        assert get(reader, Knobs(1, False)) is None
        assert get(reader, Knobs(2, True)) is None


def test_ranked_gives_timed_configs_fastest_first(path: Path) -> None:
    store = open_store(path)
    for block, trial in enumerate(
        [Evaluation("passed", 3.0), Evaluation("compile", None, "no"), Evaluation("passed", 1.0), Evaluation("passed", 2.0)]
    ):
        put(store, Knobs(block, True), trial)
    store.put(Task(OP, CASE, OTHER_VARIANT), Knobs(7, True), Evaluation("passed", 0.1))
    store.put(Task(OP, CASE, VARIANT, "hot"), Knobs(8, True), Evaluation("passed", 0.1))
    store.put(Task(OP, Case("b", (("M", 16),), "bfloat16"), VARIANT), Knobs(9, True), Evaluation("passed", 0.1))
    for reader in (store, open_store(path)):
        assert reader.ranked(Task(OP, CASE, VARIANT)) == [{"block": b, "fast": True} for b in (2, 3, 0)]
        assert reader.ranked(Task(OTHER_OP, CASE, VARIANT)) == []


def test_ranked_accepts_equal_times_of_incomparable_configs(path: Path) -> None:
    store = open_store(path)
    put(store, Knobs(2, True), Evaluation("passed", 1.0))
    put(store, Knobs(1, False), Evaluation("passed", 1.0))
    assert [values["block"] for values in store.ranked(Task(OP, CASE, VARIANT))] == [1, 2]


def test_store_appends_rows_and_the_last_counts(path: Path) -> None:
    store = open_store(path)
    before = b""
    for time_us in (3.0, 2.0, 1.0):
        put(store, Knobs(1, True), Evaluation("passed", time_us))
        after = path.read_bytes()
        assert after.startswith(before)
        assert len(after) > len(before)
        assert after.endswith(b"\n")
        before = after
    assert get(open_store(path), Knobs(1, True)) == get(store, Knobs(1, True)) == Evaluation("passed", 1.0)


def test_store_with_retry_forgets_failures_that_may_pass(path: Path) -> None:
    statuses: tuple[TrialStatus, ...] = ("passed", "skipped", "crashed", "compile", "failed", "spills")
    for i, status in enumerate(statuses):
        put(open_store(path), Knobs(i, True), Evaluation("passed", 1.0))  # the last row counts
        put(open_store(path), Knobs(i, True), Evaluation(status, 2.0 if status == "passed" else None))
    again = TrialStore(path, retries_transient=True, **FINGERPRINT)
    trials = [get(again, Knobs(i, True)) for i in range(len(statuses))]
    assert [trial and trial.status for trial in trials] == ["passed", None, None, "compile", "failed", "spills"]
    put(again, Knobs(1, True), Evaluation("skipped"))
    assert get(again, Knobs(1, True)) == Evaluation("skipped")  # not a second time


def test_store_skips_a_truncated_last_line_and_replaces_it(path: Path) -> None:
    configs = filled(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    store = open_store(path)
    assert [get(store, config) is None for config in configs] == [False, False, True]
    assert path.read_bytes() == whole[:-20]  # another process may be writing it
    put(store, configs[2], Evaluation("passed", 2.5))
    assert path.read_bytes().startswith(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert len(history(path)) == 3


def test_store_cut_anywhere_loses_at_most_the_cut_line(path: Path) -> None:
    configs = filled(path, 8)
    whole = path.read_bytes()
    rng = random.Random(0)
    lines = whole.splitlines(keepends=True)
    ends = [sum(map(len, lines[: i + 1])) for i in range(len(lines))]
    ends_of_trials = [end for line, end in zip(lines, ends, strict=True) if b'"params"' in line]
    for cut in [0, 1, ends[0] - 1, ends[0], ends[0] + 1, len(whole) - 1, *rng.sample(range(len(whole)), 20)]:
        path.write_bytes(whole[:cut])
        kept = sum(end <= cut for end in ends_of_trials)
        store = open_store(path)
        trials = [get(store, config) for config in configs]
        assert trials == [Evaluation("passed", i + 0.5) for i in range(kept)] + [None] * (len(configs) - kept), cut
        put(store, Knobs(99, True), Evaluation("passed", 9.0))
        assert sorted(dict(trial.knobs)["block"] for trial in history(path)) == [*range(kept), 99], cut


@pytest.mark.parametrize("broken", ["{not json", "[1, 2]", "7", "{}", '{"op": "fake"}', "", "\x00\x00"])
def test_store_with_a_broken_line_amid_others_raises_with_its_number(path: Path, broken: str) -> None:
    filled(path, 3)
    lines = path.read_text().splitlines()
    lines[1] = broken
    path.write_text("".join(f"{line}\n" for line in lines))
    before = path.read_bytes()
    with pytest.raises(ValueError) as caught:
        open_store(path)
    assert str(caught.value).startswith(f"{path}:2: not a trial: ")
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("time_us", value) for value in ("fast", True, 0, -1.0, 10**400, [1.0])),
        *((field, value) for field in ("axes", "options") for value in ([["M", 8]], "M", None, {"M": [8]})),
        ("axes", {"M": 8.5}),
        ("axes", {"M": True}),
        ("fingerprint", {"driver": 1}),
        *((field, 7) for field in ("op", "variant", "dtype", "quant", "policy", "status", "detail", "commit", "date")),
        *(("status", value) for value in (["passed"], {}, None)),
        ("block", [[0], [1], [2]]),
        *((field, "7") for field in ("resources", "spill_bytes", "shared_bytes")),
    ],
)
def test_store_with_a_value_of_another_type_raises_one_line(field: str, value: object, path: Path) -> None:
    filled(path, 3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if field in line.get("user_attr", {}):
            line["user_attr"][field] = value
        if field in line.get("user_attrs", {}):
            line["user_attrs"][field] = value
        if field == "time_us" and "value" in line:
            line["value"] = value
        if field in line.get("distributions", {}):
            choices = {"name": "CategoricalDistribution", "attributes": {"choices": value}}
            line["distributions"][field] = json.dumps(choices)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError) as caught:
        open_store(path)
    assert str(caught.value).startswith(f"{path}: not a")
    assert "\n" not in str(caught.value)
    assert field not in ("detail", "resources", "spill_bytes", "shared_bytes") or f"`$.{field}`" in str(caught.value)


def test_optuna_opens_the_journal_of_a_store(path: Path) -> None:
    store = open_store(path)
    for i in range(6):
        put(store, Knobs(i, i % 2 == 0), Evaluation("passed", 10.0 + i) if i < 5 else Evaluation("spills", reason="96 bytes"))
    storage = JournalStorage(JournalFileBackend(str(path)))
    names = optuna.get_all_study_names(storage)
    studies = [optuna.load_study(study_name=name, storage=storage) for name in names]
    assert every(
        study.user_attrs["axes"] == {"M": 8} and name.startswith("fake optimized M=8 ")
        for study, name in zip(studies, names, strict=True)
    )
    trials = [trial for study in studies for trial in study.trials]
    assert [trial.value for trial in trials] == [10.0, 11.0, 12.0, 13.0, 14.0, None]
    assert trials[5].state is optuna.trial.TrialState.FAIL
    assert trials[5].user_attrs["detail"] == "96 bytes"


def test_trials_of_a_case_are_one_study_whose_knobs_offer_what_the_space_does(path: Path) -> None:
    variant = replace(VARIANT, space=lambda _case: {"block": tuple(range(8)), "fast": (False, True)})
    store = open_store(path)
    for i in range(6):
        store.put(Task(OP, CASE, variant), Knobs(i, True), Evaluation("passed", 10.0 + i))
    storage = JournalStorage(JournalFileBackend(str(path)))
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    assert study.best_params == {"block": 0, "fast": True}
    assert {trial.distributions["block"].choices for trial in study.trials} == {tuple(range(8))}  # type: ignore[attr-defined]
    store.put(Task(OP, CASE, variant), Knobs(99, True), Evaluation("passed", 5.0))  # beside the space
    assert len(optuna.get_all_study_names(JournalStorage(JournalFileBackend(str(path))))) == 2
    assert len(history(path)) == 7


def test_last_trial_of_a_config_counts_across_studies_and_clocks(path: Path) -> None:
    variant = replace(VARIANT, space=lambda _case: {"block": (1, 2), "fast": (True,)})
    task, config = Task(OP, CASE, variant), Knobs(1, True)
    open_store(path, driver="0.9").put(task, config, Evaluation("passed", 3.0, date="2026-11-01T00:00:04+00:00"))
    open_store(path).put(task, Knobs(2, True), Evaluation("passed", 3.0, date="2026-11-01T00:00:03+00:00"))
    wider = replace(variant, space=lambda _case: {"block": (1, 2, 4), "fast": (True,)})
    open_store(path).put(Task(OP, CASE, wider), config, Evaluation("crashed", date="2026-11-01T00:00:02+00:00"))
    last = Evaluation("passed", 1.0, date="2026-11-01T00:00:01+00:00")
    TrialStore(path, retries_transient=True, **FINGERPRINT).put(task, config, last)
    for retries in (False, True):
        assert TrialStore(path, retries_transient=retries, **FINGERPRINT).get(task, config) == last
    assert list(newest_trials(path)[task.key].values()) == [Evaluation("passed", 3.0), last]


def test_store_ignores_trials_of_another_source_or_driver(path: Path) -> None:
    (config, *_) = filled(path, 2)
    for changes in ({"source_hash": "def"}, {"driver": "2.0"}, {"torch": "3"}):
        other = open_store(path, **changes)
        assert get(other, config) is None
        assert other.ranked(Task(OP, CASE, VARIANT)) == []
    newer = open_store(path, source_hash="def")
    put(newer, config, Evaluation("passed", 77.0))
    assert get(open_store(path, source_hash="def"), config) == Evaluation("passed", 77.0)
    assert get(open_store(path), config) == Evaluation("passed", 0.5)


def test_store_opened_later_has_trials_of_another_process(path: Path) -> None:
    first = open_store(path)
    put(first, Knobs(1, True), Evaluation("passed", 1.0))
    child = os.fork()
    if child == 0:
        try:
            put(open_store(path), Knobs(2, True), Evaluation("passed", 2.0))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    put(first, Knobs(3, True), Evaluation("passed", 3.0))
    assert [get(open_store(path), Knobs(i, True)) for i in (1, 2, 3)] == [Evaluation("passed", float(i)) for i in (1, 2, 3)]


def test_store_reads_trials_that_another_process_stored_since(path: Path) -> None:
    store, other = open_store(path), open_store(path)
    other.put(Task(OP, CASE, VARIANT), Knobs(1, True), Evaluation("spills"))
    assert get(store, Knobs(1, True)) is None
    store.refresh()
    assert get(store, Knobs(1, True)) == Evaluation("spills")
    put(store, Knobs(2, True), Evaluation("passed", 2.0))
    other.refresh()
    assert get(other, Knobs(2, True)) == Evaluation("passed", 2.0)


def test_store_appends_behind_a_line_cut_by_another_process(path: Path) -> None:
    store = open_store(path)
    put(store, Knobs(1, True), Evaluation("passed", 1.0))
    line = path.read_bytes()
    with path.open("ab") as file:
        file.write(line[:40])  # another process, killed while it wrote
    put(store, Knobs(2, True), Evaluation("passed", 2.0))
    reread = open_store(path)
    assert [get(reread, Knobs(i, True)) for i in (1, 2)] == [Evaluation("passed", 1.0), Evaluation("passed", 2.0)]


def test_store_in_a_read_only_folder_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the modes of the files are not enough of a test."""
    (config, *_) = filled(path, 2)
    with path.open("ab") as file:
        file.write(b'{"op": ')
    before = path.read_bytes()
    opened = Path.open

    def read_only(self: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        if set(mode) & set("wax+"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(self, mode, *args, **more)

    monkeypatch.setattr(Path, "open", read_only)
    assert get(open_store(path), config) == Evaluation("passed", 0.5)
    assert [len(evaluations) for evaluations in newest_trials(path).values()] == [2]
    assert path.read_bytes() == before


def test_store_of_two_writers_keeps_all_trials(path: Path) -> None:
    """A line in progress stays; only the partial line of a killed process is cut off."""
    store = open_store(path)
    put(store, Knobs(1, True), Evaluation("passed", 1.0))
    text = path.read_text()
    line = text.splitlines(keepends=True)[-1]
    with path.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(line[:40])
        other.flush()
        waiting = Thread(target=put, args=(store, Knobs(2, True), Evaluation("passed", 2.0)))
        waiting.start()
        time.sleep(0.2)
        assert waiting.is_alive()
        assert path.read_text() == text + line[:40]
        other.write(line[40:])
        other.flush()
        fcntl.flock(other, fcntl.LOCK_UN)
        waiting.join()
    assert [dict(trial.knobs)["block"] for trial in history(path)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("before", "now"), [("ok", "passed"), ("wrong", "failed"), ("memory", "skipped"), ("lost", "crashed"), ("spills", "spills")]
)
def test_store_reads_an_older_status_as_its_present_name(before: str, now: TrialStatus, path: Path) -> None:
    evaluation = Evaluation(now, 1.0 if now == "passed" else None, "exit code 1")
    put(open_store(path), Knobs(1, True), evaluation)
    path.write_text(path.read_text().replace(f'"{now}"', f'"{before}"'))
    assert f'"{before}"' in path.read_text()
    assert get(open_store(path), Knobs(1, True)) == evaluation


def test_store_in_a_folder_that_cannot_be_made_raises_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "fake.log"
    store = open_store(path)
    with pytest.raises(ValueError) as caught:
        put(store, Knobs(1, True), Evaluation("passed", 1.0))
    assert str(caught.value).startswith(f"cannot write {path}: ")
    assert "\n" not in str(caught.value)
    assert get(store, Knobs(1, True)) is None


def test_store_with_a_folder_in_place_of_its_file_raises_one_line(path: Path) -> None:
    store = open_store(path)
    path.mkdir(parents=True)
    with pytest.raises(ValueError, match=f"^cannot (write|read) {path}: "):
        put(store, Knobs(1, True), Evaluation("passed", 1.0))
    with pytest.raises(ValueError, match=f"^cannot read {path}: "):
        open_store(path)


def test_store_with_a_deeply_nested_line_raises_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trials.log"
    path.write_text("[" * 3000 + "\n")
    with pytest.raises(ValueError, match=r"^.*trials\.log:1: not a trial: "):
        history(path)
