"""Stale configs and records: their order of measurement, and rows that an interruption or a budget keeps."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_gpu
import msgspec
import pytest
from fake_gpu import OPS, Bench, entries_of
from typer.testing import CliRunner

from kerneltune import cache, device, records, stale, sweep_run
from kerneltune.cli import app
from kerneltune.measuring.compare import make_record
from kerneltune.plan import Options, Selection, load_plan
from kerneltune.progress import Progress
from kerneltune.records import Record
from kerneltune.search.loop import SearchLimits
from kerneltune.task import Outcome, Run
from kerneltune.tune.run import run_tune

SWEEP = """
family: tiny
ops: [stream]
defaults: {dtype: int32}
bench:
  - {name: other, read: 524288, write: 1048576}
  - {name: first, read: 1048576, write: 1048576}
  - {name: last, read: 2097152, write: 1048576}
headline: {case: first}
"""
GPU = "nvidia_h200"
DEFAULT = {"block": 1024, "warps": 4, "ctas": 0}
SLOW = {"block": 4096, "warps": 8, "ctas": 8}
LABEL = "stream " + OPS["stream"].variants[0].name
measured: list[str] = []


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    measured.clear()
    monkeypatch.setattr(sweep_run, "GpuWorker", Bench)
    monkeypatch.setattr(sweep_run, "compare_in_worker", compared)
    with fake_gpu.stands_in(monkeypatch):
        yield


def compared(_bench: Bench, family: str, runs: Sequence[Run], _ceiling: Run | None) -> list[Record]:
    """Measure a case in no time."""
    times = {"time_us": 10.0, "gbps": 100.0, "ci_low_us": 9.9, "ci_high_us": 10.1, "n": 5}
    new_records = [make_record(family, run, Outcome("checked")) for run in runs]
    measured.append(new_records[0].case)
    return [msgspec.structs.replace(row, status="passed", **times) for row in new_records]


@pytest.fixture
def selection(tmp_path: Path) -> Selection:
    (tmp_path / "tiny.yaml").write_text(SWEEP)
    return Selection(str(tmp_path / "tiny.yaml"))


@pytest.fixture
def options(tmp_path: Path, selection: Selection) -> Options:
    """Return folders with a config and a record of each case, all of other code; the config of `last` is a slow one."""
    cache.use_root(tmp_path / "configs")
    options = Options(results=tmp_path / "results")
    entries = entries_of(run_tune(load_plan(OPS, selection, options), Progress()))
    assert len(entries) == 3
    old = [replace(entry, evidence=entry.evidence | {"source_hash": "old"}) for entry in entries]
    old = [replace(entry, config=SLOW) if entry.case.axes[0][1] == 2097152 else entry for entry in old]
    for entry in old:
        cache.store(GPU, entry)
    (tmp_path / "results" / GPU).mkdir(parents=True)
    (tmp_path / "results" / GPU / "tiny.jsonl").touch()
    before = find(selection, options)
    sweep_run.measure_batches([(before.families[0].plan, before.families[0].plan.cases())], Progress())
    rows = [msgspec.structs.replace(row, source_hash="old") for row in recorded(options)]
    records.merge(tmp_path / "results" / GPU / "tiny.jsonl", rows)
    measured.clear()
    return options


def find(selection: Selection, options: Options, gpu: str = GPU) -> stale.Stale:
    return stale.find(stale.plans_of(OPS, selection, options), gpu)


def recorded(options: Options) -> list[Record]:
    assert options.results is not None
    rows = records.load(options.results / GPU / "tiny.jsonl")
    assert rows
    return rows


def stored(options: Options) -> dict[int, cache.CacheEntry]:
    entries = cache.load_strict(cache.path_of("stream", GPU))
    return {entry.case.axes[0][1]: entry for entry in entries}


def test_find_stale_returns_configs_and_records_with_headlines_first(selection: Selection, options: Options) -> None:
    stale_parts = find(selection, options)
    assert [entry.case.axes[0][1] for entry in stale_parts.configs] == [1048576, 524288, 2097152]
    assert stale_parts.num_cached == {"stream": 3}
    assert [entry.case.name for entry in stale_parts.families[0].stale] == ["first", "other", "last"]
    assert (stale_parts.families[0].num_cases, stale_parts.num_stale_cases, stale_parts.families[0].num_orphans) == (3, 3, 0)
    one = find(replace(selection, cases=("other",)), options)
    assert [entry.case.name for entry in one.families[0].stale] == ["other"]
    assert [entry.case.axes[0][1] for entry in one.configs] == [524288]
    other = find(selection, options, "nvidia_h100")
    assert (other.gpu, other.num_cached, other.configs, other.families) == ("nvidia_h100", {}, (), ())


def test_renew_leaves_nothing_stale_and_replaces_a_slower_config(selection: Selection, options: Options) -> None:
    before = stored(options)
    stale_parts = find(selection, options)
    renewals, _, remaining = stale.renew(stale_parts, Progress())
    assert [result.entry is not None and result.entry.config == entry.config for entry, result in renewals] == [True, True, False]
    assert measured == ["first", "other", "last"]
    assert (remaining.configs, remaining.num_stale_cases) == ((), 0)
    now = stored(options)
    assert [now[size].config for size in (524288, 1048576)] == [before[size].config for size in (524288, 1048576)]
    default = OPS["stream"].variants[0].default_config(now[2097152].case)
    assert now[2097152].config == {"block": default.block, "warps": default.warps, "ctas": default.ctas} != SLOW
    assert {row.source_hash for row in recorded(options)} == {OPS["stream"].variants[0].source_hash}
    assert stale.renew(remaining, Progress())[:2] == ([], [])
    assert measured == ["first", "other", "last"]


def test_budget_that_is_spent_measures_nothing_and_keeps_all(selection: Selection, options: Options) -> None:
    before, rows = stored(options), recorded(options)
    renewals, _, remaining = stale.renew(find(selection, replace(options, search=SearchLimits(0.0))), Progress())
    assert renewals == []
    assert (len(remaining.configs), remaining.num_stale_cases, measured) == (3, 3, [])
    assert (stored(options), recorded(options)) == (before, rows)


def test_cases_with_records_are_measured_before_cases_without(selection: Selection, options: Options) -> None:
    assert options.results is not None
    path = options.results / GPU / "tiny.jsonl"
    kept = [row for row in recorded(options) if row.case != "other"]
    path.unlink()
    records.append(path, kept)
    stale.renew(find(selection, options), Progress())
    assert measured == ["first", "last", "other"]


def test_interrupted_renewal_keeps_the_cases_it_measured(
    selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def second_interrupts(*arguments: Any) -> list[Record]:
        if measured:
            raise KeyboardInterrupt
        return compared(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(sweep_run, "compare_in_worker", second_interrupts)
        with pytest.raises(KeyboardInterrupt):
            stale.renew(find(selection, options), Progress())
    remaining = find(selection, options)
    assert (remaining.configs, [entry.case.name for entry in remaining.families[0].stale]) == ((), ["other", "last"])
    stale.renew(remaining, Progress())
    assert measured == ["first", "other", "last"]


def test_case_whose_config_has_changed_is_stale(selection: Selection, options: Options) -> None:
    *_, remaining = stale.renew(find(selection, options), Progress())
    assert remaining.num_stale_cases == 0
    cache.store(GPU, replace(stored(options)[1048576], config=DEFAULT | {"ctas": 1}))
    (family,) = find(selection, options).families
    assert [entry.case.name for entry in family.stale] == ["first"]


def test_sweep_stale_lists_stale_cases_and_then_measures_them(selection: Selection, options: Options) -> None:
    folders = ["--configs", str(cache.default_root()), "--results", str(options.results)]

    def run(*more: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["sweep", selection.family, "--stale", *folders, *more])
        return result.exit_code, result.stdout

    code, text = run("--check-only")
    assert (code, measured) == (0, [])
    assert re.search(r"^configs +stream +3 +3 +0\.0$", text, re.MULTILINE), text
    assert re.search(r"^cases +tiny +3 +3 +\d+\.\d$", text, re.MULTILINE), text
    code, text = run("--budget", "1e-9")
    assert (code, measured) == (0, [])
    assert text.endswith("3 configs and 3 cases are stale; the same command goes on there\n")
    code, text = run()
    assert (code, measured) == (0, ["first", "other", "last"])
    assert "configs: 2 as good as their default, 1 slower, which the default replaces, 0 that no longer run" in text
    assert text.endswith("nothing is stale for nvidia_h200\n")


def test_case_that_no_config_can_run_any_more_is_stale(selection: Selection, options: Options) -> None:
    """Such a case must not end the list of all families with an error, though the config of a call is looked up."""
    stale.renew(find(selection, options), Progress())
    (variant,) = OPS["stream"].variants
    refusing = replace(variant, invalid=lambda case, _config: "too short" if case["read"] == 524288 else None)
    operators = {**OPS, "stream": replace(OPS["stream"], variants=(refusing,))}
    (family,) = stale.find(stale.plans_of(operators, selection, options), GPU).families
    assert [entry.case.name for entry in family.stale] == ["other"]


def test_case_is_not_stale_for_a_peer_that_does_not_support_it(selection: Selection, options: Options) -> None:
    """Expect no row of a peer for a case that it does not support: no measurement can give it a time there."""
    stale.renew(find(selection, options), Progress())
    (own,) = OPS["stream"].variants
    refuses = {"unsupported": lambda case: "too short" if case["read"] == 524288 else None, "requires": ("json",)}
    operators = {**OPS, "stream": replace(OPS["stream"], variants=(own, replace(own, name="peer", **refuses)))}
    plans = stale.plans_of(operators, selection, options)
    assert [entry.case.name for entry in stale.find(plans, GPU).families[0].stale] == ["first", "last"]
    of_own = next(row for row in recorded(options) if row.case == "other")
    of_peer = {"variant": "peer", "role": "peer", "source_hash": "old", "time_us": None, "gbps": None, "n": None}
    untimed = {"ci_low_us": None, "ci_high_us": None, "reason": "too short"}
    path = options.results / GPU / "tiny.jsonl"
    records.append(path, [msgspec.structs.replace(of_own, status="skipped", **of_peer, **untimed)])
    assert [entry.case.name for entry in stale.find(plans, GPU).families[0].stale] == ["first", "last"]


def test_family_without_records_of_the_gpu_is_stale_only_where_it_is_named(
    selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU with records of one family must not have every other family listed."""
    folder = options.results / GPU
    (folder / "tiny.jsonl").rename(folder / "another.jsonl")
    assert [family.plan.family for family in find(selection, options).families] == ["tiny"]
    monkeypatch.setattr(stale.sweep_file, "families", lambda: [selection.family])
    assert find(replace(selection, family=""), options).families == ()


def test_sweep_stale_without_a_gpu_lists_records_of_a_gpu_without_configs(
    selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    (options.results / GPU).rename(options.results / "nvidia_l4")
    monkeypatch.setattr(device, "current", lambda: device.NO_GPU)
    folders = ["--configs", str(cache.default_root()), "--results", str(options.results)]
    text = CliRunner().invoke(app, ["sweep", selection.family, "--stale", *folders]).stdout
    assert re.search(r"^nvidia_l4 +cases +tiny +3 +3 ", text, re.MULTILINE), text


def test_renew_keeps_the_time_of_a_variant_whose_import_fails_and_notes_it_once(
    selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Notes(Progress):
        def note(self, text: str) -> None:
            notes.append(text)

    def unimported(_bench: Bench, family: str, runs: Sequence[Run], _ceiling: Run | None) -> list[Record]:
        return [make_record(family, run, Outcome("skipped", f"{records.IMPORT_FAILED}ImportError: x")) for run in runs]

    notes: list[str] = []
    before = recorded(options)
    monkeypatch.setattr(sweep_run, "compare_in_worker", unimported)
    _, new, remaining = stale.renew(find(selection, options), Notes())
    assert (len(new), recorded(options), remaining.num_stale_cases) == (3, before, 3)
    variant = OPS["stream"].variants[0].name
    assert notes == [f"{variant} cannot be imported: ImportError: x: cases with an earlier time of it stay stale"]


def renewed(selection: Selection, options: Options) -> tuple[int, str]:
    """Return the exit code of `sweep --stale`, and its output without line breaks."""
    folders = ["--configs", str(cache.default_root()), "--results", str(options.results)]
    result = CliRunner().invoke(app, ["sweep", selection.family, "--stale", *folders])
    return result.exit_code, " ".join(result.stdout.split())


@pytest.mark.parametrize("reason", ["crashed", "invalid"])
def test_config_that_does_not_run_is_dropped_and_the_default_serves(
    reason: str, selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale config that crashes stayed in the cache, stale for ever, and calls went on to use it."""
    if reason == "crashed":
        monkeypatch.setattr(Bench, "crashed", staticmethod(lambda config: config.ctas == SLOW["ctas"]))
        problem = "crashed: took longer than 60 s"
    else:
        cache.store(GPU, replace(stored(options)[2097152], config={"block": 1024}))
        problem = f"config of {OPS['stream'].variants[0].name}: expected the knobs ['block', 'ctas', 'warps'], got ['block']"
    code, text = renewed(selection, options)
    assert code == 1
    assert f"dropped: {LABEL} read=2097152 write=1048576 int32 none: {problem}" in text
    assert "2 as good as their default, 0 slower, which the default replaces, 1 that no longer run" in text
    assert "`kerneltune tune` searches their cases" in text
    assert text.endswith("nothing is stale for nvidia_h200")
    assert set(stored(options)) == {524288, 1048576}
    code, text = renewed(selection, options)
    assert (code, "dropped" in text) == (0, False)


def test_config_that_does_not_run_is_kept_while_its_default_does_not(
    selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bench, "crashed", staticmethod(lambda _config: True))
    before = stored(options)
    code, text = renewed(selection, options)
    assert (code, stored(options)) == (1, before)
    assert f"failed: {LABEL} read=2097152 write=1048576 int32 none: crashed: took longer than 60 s" in text
    assert "3 configs and" in text


def test_config_that_crashes_once_is_timed_again(selection: Selection, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_slow: list[Any] = []

    def crashes_first(config: Any) -> bool:
        measured_slow.extend([config] if config.ctas == SLOW["ctas"] else [])
        return len(measured_slow) == 1 and config == measured_slow[0]

    monkeypatch.setattr(Bench, "crashed", staticmethod(crashes_first))
    code, text = renewed(selection, options)
    assert (code, len(measured_slow)) == (0, 2)
    assert "2 as good as their default, 1 slower, which the default replaces, 0 that no longer run" in text


@pytest.mark.parametrize("more", [(), ("--check-only",)])
def test_sweep_stale_without_records_and_stale_configs_exits_with_2(
    selection: Selection, more: tuple[str, ...], tmp_path: Path
) -> None:
    """A folder that is named by mistake, or another current folder, must not pass as up to date."""
    folders = ["--configs", str(tmp_path / "none"), "--results", str(tmp_path / "empty")]
    result = CliRunner().invoke(app, ["sweep", selection.family, "--stale", *more, *folders])
    assert (result.exit_code, result.stdout, measured) == (2, "", [])
    assert result.stderr == f"error: results: {tmp_path}/empty: no records of {GPU} that could be stale\n"


def test_sweep_stale_of_fresh_records_prints_one_line(selection: Selection, options: Options) -> None:
    stale.renew(find(selection, options), Progress())
    folders = ["--configs", str(cache.default_root()), "--results", str(options.results)]
    result = CliRunner().invoke(app, ["sweep", selection.family, "--stale", "--check-only", *folders])
    assert (result.exit_code, "".join(result.stdout.split())) == (0, f"nothingisstalefor{GPU}in{options.results}")


@pytest.mark.parametrize(
    ("more", "message"),
    [(("--trials", "3"), "trials: 3: not with --stale"), (("--no-tune",), "no-tune: not with --stale")],
)
def test_sweep_stale_with_options_that_it_ignores_raises(selection: Selection, more: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["sweep", selection.family, "--stale", *more])
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")


@pytest.mark.parametrize("family", ["", "tiny"])
def test_sweep_stale_of_a_selection_without_a_case_raises(
    selection: Selection, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stale.sweep_file, "families", lambda: [selection.family])
    with Path(selection.family).open("a") as file:
        file.write("check: [{name: nope, read: 8, write: 8}]\n")
    asked = [selection.family] if family else []
    result = CliRunner().invoke(app, ["sweep", *asked, "--stale", "--check-only", "--case", "nope"])
    where = selection.family if family else "families"
    assert (result.exit_code, result.stderr) == (2, f"error: {where}: no case with case=nope\n")


def test_sweep_stale_of_a_family_without_bench_cases_raises(tmp_path: Path) -> None:
    path = tmp_path / "checks.yaml"
    path.write_text("family: checks\nops: [stream]\ncheck: [{name: one, read: 8, write: 8}]\n")
    result = CliRunner().invoke(app, ["sweep", str(path), "--stale", "--results", str(tmp_path)])
    assert (result.exit_code, result.stderr) == (2, f"error: {path}: no bench case\n")


def test_config_of_a_variant_that_is_not_here_is_neither_stale_nor_dropped(selection: Selection, options: Options) -> None:
    path = cache.path_of("stream", GPU)
    path.write_text(path.read_text().replace(f'"variant": "{OPS["stream"].variants[0].name}"', '"variant": "of_a_plugin"'))
    assert {entry.variant for entry in cache.load("stream", GPU)} == {"of_a_plugin"}
    found = stale.find(stale.plans_of(OPS, selection, options), GPU)
    assert found.configs == ()
