"""One case tuned by several tuners: same configs, empty caches, one common run, and a table that says what was not possible."""

import itertools
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import versus_jobs
from triton.runtime.errors import OutOfResources
from typer.testing import CliRunner
from versus_jobs import CASE, H200, OP, VARIANT, Bench, Knobs

from kerneltune import device, ops
from kerneltune.cli import app
from kerneltune.lab import tuners, versus
from kerneltune.lab.tuners import EXHAUSTIVE, HELION, US, ContestTask, TunerResult, by_helion, by_triton, finalists
from kerneltune.lab.versus import BEST, DEFAULT, Contest, contest, keep
from kerneltune.plan import Options, Quiet
from kerneltune.search.loop import Search
from kerneltune.search.task import Task
from kerneltune.spec import Case

SIDES = {US: versus_jobs.ours, EXHAUSTIVE: versus_jobs.triton, "Third": versus_jobs.broken}


def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: H200)
    monkeypatch.setattr(versus, "obstacle", lambda *_: None)


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    on_an_h200(monkeypatch)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(results=tmp_path / "results", configs=tmp_path / "configs")


@pytest.fixture(scope="module")
def fought(tmp_path_factory: pytest.TempPathFactory) -> tuple[Contest, Path]:
    """Hold a contest of all sides; return it and the folder that it was given."""
    folder = tmp_path_factory.mktemp("contest")
    options = Options(results=folder / "results", configs=folder / "configs")
    knobs = (("block", ("0", "1", "2", "3")),)
    with pytest.MonkeyPatch.context() as monkeypatch:
        on_an_h200(monkeypatch)
        monkeypatch.setitem(sys.modules, "helion", None)  # type: ignore[arg-type]  # not installed
        return contest(OP, CASE, VARIANT, knobs, Search(until_gain=0.01), options, Quiet(), SIDES, Bench), folder


def test_all_sides_search_the_same_configs_and_meet_in_one_run(fought: tuple[Contest, Path]) -> None:
    found, folder = fought
    lines = {line.name: line for line in found.lines}
    assert list(lines) == [US, EXHAUSTIVE, "Third", "Helion autotune", "Kernel Tuner", DEFAULT, BEST]
    assert found.configs == 16
    ours, theirs = lines[US], lines[EXHAUSTIVE]
    assert ours.config == {"block": 3, "warps": 8} == lines[BEST].config
    assert ours.evaluations == 16
    assert theirs.config == {"block": 2, "warps": 8}  # fastest by its own clock, but wrong
    assert (theirs.time_us, theirs.gap, theirs.evaluations) == (None, None, 16)
    assert theirs.remark == ("one compilation after the other, no check of results, 1 could not be launched; wrong: off by one")
    assert ours.gap is not None
    assert ours.gap.median == 0.0
    said = r"first config compiled after \d+\.\d s, from there GPU idle for 100 %"
    assert re.fullmatch(f"{said}; stops when the rest is expected to gain less than 1 %", ours.remark)
    gap = lines[DEFAULT].gap
    assert gap is not None
    assert gap.median == pytest.approx(13.875 / 10 - 1)
    assert gap.low <= gap.median <= gap.high
    assert lines["Third"].remark == "RuntimeError: no config found"
    assert lines["Kernel Tuner"].remark.startswith("compiles CUDA")
    assert lines["Helion autotune"].remark == "helion is not installed"
    assert ours.wall_s is not None
    assert theirs.wall_s is not None
    assert found.share == ours.wall_s / theirs.wall_s
    assert not (folder / "configs").exists()


def test_a_contest_is_kept_beside_the_others(fought: tuple[Contest, Path], options: Options) -> None:
    found, _ = fought
    path, table = keep(found, ["kerneltune", "lab", "versus", "my op"], options)
    row = json.loads(path.read_text())
    assert path.name == "fake_optimized_a_bfloat16_none_cold.json"
    assert path.parent.name == "versus"
    assert row["command"] == "kerneltune lab versus 'my op'"
    assert row["configs"] == 16
    assert row["driver"] == "580"
    assert [line["name"] for line in row["lines"]] == [line.name for line in found.lines]
    keep(replace(found, case=replace(CASE, name="b")), ["kerneltune"], options)
    text = table.read_text()
    assert text.count("| tuner | wall s |") == 2
    assert "**fake optimized b bfloat16 none**: 16 configs; wall time" in text
    assert f"| {BEST} |  |  | 10.00 | 0.0 | 0.0 | 0.0 |  |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("| ")}) == 1


class Sides:
    """Stands for the processes of the sides: finds what it is told to, counts how often it was asked."""

    def __init__(self, **found: TunerResult | Exception) -> None:
        self.found, self.asked = found, list[str]()

    def __call__(self, name: str, _side: object, _task: ContestTask) -> TunerResult:
        self.asked.append(name)
        found = self.found[name]
        if isinstance(found, Exception):
            raise found
        return found


A, B = TunerResult(Knobs(3, 8), 2.0, 9, (Knobs(3, 8), Knobs(3, 4)), "first"), TunerResult(Knobs(0, 8), 40.0, 20, (Knobs(0, 8),))


def again(
    options: Options, sides: Sides, monkeypatch: pytest.MonkeyPatch, trials: int | None = None, limit_s: int | None = None
) -> Contest:
    """Hold a contest between the sides A, B and, where they have it, Helion."""
    monkeypatch.setattr(versus, "tune_side", sides)
    monkeypatch.setattr(versus, "unable", dict)
    names = {name: versus_jobs.broken for name in sides.found}
    return contest(OP, CASE, VARIANT, (), Search(trials=trials), options, Quiet(), names, Bench, limit_s)


def journals(options: Options) -> list[Path]:
    assert options.results is not None
    return sorted(options.results.glob("runs/*/versus/*/*.json"))


def test_an_interrupted_contest_goes_on_with_the_side_that_had_not_ended(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as interrupted:
        interrupted.setattr(versus, "judge_configs", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        again(options, Sides(A=A, B=B, C=RuntimeError("out of memory")), monkeypatch)
    later = Sides(A=A, B=B, C=A)
    found = again(options, later, monkeypatch)
    assert later.asked == ["C"]
    assert [(line.name, line.wall_s, line.remark) for line in found.lines][:3] == [
        ("A", 2.0, "first"),
        ("B", 40.0, ""),
        ("C", 2.0, "first"),
    ]
    assert found.lines[0].config == {"block": 3, "warps": 8}
    keep(found, ["kerneltune"], options)
    assert journals(options) == []
    anew = Sides(A=A, B=B)
    again(options, anew, monkeypatch)
    assert anew.asked == ["A", "B"]


def test_what_was_found_under_another_search_or_limit_is_not_taken(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    again(options, Sides(A=A, **{HELION: B}), monkeypatch)
    other_search = Sides(A=A, **{HELION: B})
    again(options, other_search, monkeypatch, trials=5)
    assert other_search.asked == ["A", HELION]
    other_limit = Sides(A=A, **{HELION: B})
    again(options, other_limit, monkeypatch, limit_s=30)
    assert other_limit.asked == [HELION]
    monkeypatch.setattr(versus, "helion_version", lambda: "9.9")
    other_helion = Sides(A=A, **{HELION: B})
    again(options, other_helion, monkeypatch)
    assert other_helion.asked == ["A", HELION]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("hello", r": JSON: invalid character .*; move the file away to start anew$"),
        ("[1]", r": JSON: \[1\]: expected object; move the file away to start anew$"),
        ('{"A": {"wall_s": 2.0}}', r": config: missing; move the file away to start anew$"),
    ],
)
def test_a_journal_of_something_else_is_left_as_it_is(
    line: str, message: str, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    again(options, Sides(A=A), monkeypatch)
    (journal,) = journals(options)
    journal.write_text(line + "\n")
    nobody = Sides(A=A)
    with pytest.raises(ValueError, match=message):
        again(options, nobody, monkeypatch)
    assert nobody.asked == []
    assert journal.read_text() == line + "\n"


def test_a_space_of_one_config_is_no_contest(options: Options) -> None:
    with pytest.raises(ValueError, match=r"^fake M=8 bfloat16 none: one config: expected a space to search$"):
        contest(OP, CASE, VARIANT, (("block", ("3",)), ("warps", ("8",))), Search(), options, Quiet(), SIDES, Bench)


def test_a_space_is_narrowed_to_what_it_offers(options: Options) -> None:
    with pytest.raises(ValueError, match=r"^fake optimized: M=8 bfloat16 none: knob: 3: expected one of 1, 2, 4, 8$"):
        contest(OP, CASE, VARIANT, (("warps", ("8", "3")),), Search(), options, Quiet(), SIDES, Bench)


def test_nothing_found_is_an_error(options: Options) -> None:
    with pytest.raises(ValueError, match=r"no side found a config: RuntimeError: no config found$"):
        contest(OP, CASE, VARIANT, (), Search(), options, Quiet(), {"Third": versus_jobs.broken}, Bench)


def test_an_autotuner_that_can_launch_nothing_says_why(options: Options, tmp_path: Path) -> None:
    knobs = (("block", ("3",)), ("warps", ("4", "8")))
    only = ContestTask(Task(OP, CASE, VARIANT), knobs, Search(), options, tmp_path)

    def refuse(*_: object, **__: object) -> list[float]:
        raise OutOfResources(1, 0, "registers")

    with pytest.raises(ValueError, match=r"^no config could be launched$"):
        by_triton(only, refuse, "cpu")


def test_helion_is_given_the_knobs_and_told_what_does_not_go_together(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for Helion that tries everything: the default's values come first, as Helion begins with them."""
    refused: list[Mapping[str, Any]] = []
    limits: list[int | None] = []

    def autotune(tunables: Mapping[str, tuple[Any, ...]], compiled: Any, tensors: Any, **given: Any) -> Mapping[str, Any]:
        limits.append(given.get("autotune_budget_seconds"))
        assert list(tunables) == ["block", "warps"]
        assert [offer[0] for offer in tunables.values()] == [0, 1]
        ranking = {}
        for chosen in itertools.product(*tunables.values()):
            given = dict(zip(tunables, chosen, strict=True))
            try:
                compiled(given)(*tensors)
                ranking[chosen] = given
            except OutOfResources:
                refused.append(given)
        return min(ranking.values(), key=lambda given: versus_jobs.time_us(Knobs(**given)))

    helion = SimpleNamespace(autotune=autotune, EnumFragment=lambda choices: choices)
    monkeypatch.setitem(sys.modules, "helion", SimpleNamespace(autotuner=helion))
    monkeypatch.setitem(sys.modules, "helion.autotuner", helion)
    odd = replace(VARIANT, valid=lambda _case, config: "odd" if (config.block, config.warps) == (4, 2) else None)
    task = ContestTask(Task(OP, CASE, odd), (("block", ("0", "4")),), Search(), options, tmp_path)
    found = by_helion(task, "cpu")
    assert found.config == Knobs(4, 8)
    assert found.evaluations == 8
    assert refused == [{"block": 4, "warps": 2}]
    assert "stopped" not in found.remark
    clock = itertools.count(0.0, 31.0)
    monkeypatch.setattr(tuners, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert by_helion(replace(task, limit_s=30), "cpu").remark.endswith(", stopped after 31 s")
    assert limits == [None, 30]


def test_the_finalists_are_the_choices_the_default_and_the_best_of_every_ranking() -> None:
    a, b, c, d = (Knobs(i, 1) for i in range(4))
    sides = [TunerResult(b, 1.0, 3, (b, a, c)), TunerResult(d, 1.0, 3, (d, b))]
    assert finalists(sides, a, 2) == [b, d, a]
    assert finalists(sides, a, 3) == [b, d, a, c]


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: device.NO_GPU)
    result = CliRunner().invoke(app, ["lab", "versus", "rmsnorm", "--op", "rmsnorm_fwd"])
    assert (result.exit_code, result.stderr) == (2, "error: lab versus needs a GPU: in the interpreter nothing can be timed\n")
    nothing = CliRunner().invoke(app, ["lab", "versus", "rmsnorm", "--case", "no-such"])
    assert nothing.stderr.endswith("rmsnorm.yaml: no case with case=no-such\n")
    for seconds in ("0", "nan"):
        result = CliRunner().invoke(app, ["lab", "versus", "rmsnorm", "--helion-budget", seconds])
        assert (result.exit_code, result.stderr) == (2, f"error: helion-budget: {float(seconds)!r}: expected 1 or more\n")
    result = CliRunner().invoke(app, ["lab", "versus", "rmsnorm", "--restrict", "warps"])
    assert (result.exit_code, result.stderr) == (2, "error: restrict: 'warps': expected NAME=V1,V2\n")


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_our_config_is_as_good_as_that_of_the_exhaustive_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the GPU is real
    op = ops.load()["stream"]
    case = Case("big", (("read", 64 << 20), ("write", 64 << 20)), "int32")
    options = Options(results=tmp_path / "results", configs=tmp_path / "configs")
    found = contest(op, case, op.variants[0], (), Search(until_gain=0.01), options, Quiet())
    lines = {line.name: line for line in found.lines}
    for name in (US, EXHAUSTIVE):
        gap = lines[name].gap
        assert gap is not None, lines[name]
        assert gap.median <= 0.03, lines[name]
