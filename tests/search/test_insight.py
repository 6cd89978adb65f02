"""Statistics of trials, on small literal times."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_operator import H200
from typer.testing import CliRunner

from kerneltune import device, ops
from kerneltune.cli import app
from kerneltune.search import insight
from kerneltune.search.insight import dead_values, importances, num_to_near, set_cover, ties
from kerneltune.search.trials import TrialStore
from kerneltune.spec import Case
from kerneltune.task import Evaluation, Task, trials_file
from kerneltune.tune.session import TuningResult


def knobs(block: int, warps: int) -> insight.Knobs:
    return ("block", block), ("warps", warps)


@pytest.mark.parametrize(("best", "expected"), [(10.0, 4), (9.9, 4), (9.7, 5)])
def test_num_to_near_counts_to_the_first_time_within_2_percent_of_the_best(best: float, expected: int) -> None:
    assert num_to_near([Evaluation("passed", time) for time in (None, 20.0, 30.0, 10.0, best)]) == expected


def test_importances_rank_the_knob_that_decides_first() -> None:
    times = {knobs(b, w): 10.0 + b + 0.001 * w for b in range(8) for w in range(4)}
    ranked = importances(times)
    assert list(ranked) == ["block", "warps"]
    assert ranked["block"] > 0.8
    assert importances({knobs(1, 1): 1.0}) == {} == importances({knobs(1, 1): 1.0, knobs(2, 1): 1.0})


def test_dead_values_are_knob_values_never_near_the_best() -> None:
    first = {knobs(1, 1): 10.0, knobs(1, 2): 10.1, knobs(2, 1): 15.0, knobs(3, 1): 20.0}
    second = {knobs(1, 1): 10.0, knobs(3, 1): 10.1}
    assert [(knob, value, round(part, 3)) for knob, value, part in dead_values([first, second])] == [("block", 2, 0.167)]


def test_ties_are_configs_within_1_percent_of_the_best() -> None:
    assert ties({knobs(1, 1): 10.05, knobs(2, 1): 10.0, knobs(3, 1): 10.2}) == [knobs(2, 1), knobs(1, 1)]


def test_set_cover_is_the_smallest_where_the_greedy_one_is_larger() -> None:
    """Greed takes the config of four cases first, and then needs two more; two configs of three cases do."""
    a, b, c = knobs(1, 1), knobs(2, 1), knobs(3, 1)
    good: dict[insight.Knobs, set[int]] = {a: {0, 1, 2}, b: {3, 4, 5}, c: {1, 2, 3, 4}}
    cases: list[dict[insight.Knobs, float]] = [
        {config: 10.0 if case in covered else 20.0 for config, covered in good.items()} for case in range(6)
    ]
    configs, worst, is_exact = set_cover(cases)
    assert set(configs) == {a, b}
    assert is_exact
    assert worst == 0.0


def test_set_cover_returns_the_largest_remaining_gap() -> None:
    configs, worst, _ = set_cover([{knobs(1, 1): 10.15, knobs(2, 1): 10.0}, {knobs(1, 1): 5.0}])
    assert configs == [knobs(1, 1)]
    assert worst == pytest.approx(0.015)


def test_trials_command_prints_statistics_of_the_store(tmp_path: Path) -> None:
    op = ops.load()["rmsnorm_bwd"]
    variant = op.variant("optimized")
    store = TrialStore(trials_file(tmp_path, "nvidia_h200", "rmsnorm_bwd"), source_hash="x")
    case = Case("te-8192x4096", (("M", 8192), ("N", 4096)), "bfloat16", "none", (("zero_centered", False),))
    for i, config in enumerate(variant.configs(case)):
        trial = Evaluation("spills") if i % 5 == 4 else Evaluation("passed", 50.0 + 10 * (config.stages == 2) + config.rows)
        store.put(Task(op, case, variant), config, trial)
    command: list[Any] = ["trials", "rmsnorm", "--gpu", "nvidia_h200", "--results", str(tmp_path), "--op", "rmsnorm_bwd"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    spilling = (i + 1) // 5
    assert lines[0] == f"rmsnorm_bwd optimized none: 1 case, {i + 1} trials ({i + 1 - spilling} passed, {spilling} spills)"
    (row,) = [line for line in lines if line.startswith("te-8192x4096")]
    assert row.split()[:4] == ["te-8192x4096", "bfloat16", "51.00", str(i + 1)]
    assert any(line.startswith("  never within 2 %: stages=2 (-") for line in lines)
    at = lines.index("  1 config keeps every case (1) within 2 % of its best (worst 0.0 %)")
    assert "stages=" in lines[at + 1]


def test_tune_command_ends_with_a_short_form_of_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: H200)
    op = ops.load()["rmsnorm_bwd"]
    variant = op.variant("optimized")
    store = TrialStore(trials_file(tmp_path, "nvidia_h200", "rmsnorm_bwd"), source_hash="x")
    for m in (8192, 16384):
        case = Case(f"te-{m}x4096", (("M", m), ("N", 4096)), "bfloat16", "none", (("zero_centered", False),))
        for i, config in enumerate(variant.configs(case)):
            trial = Evaluation("spills") if i % 5 == 4 else Evaluation("passed", 50.0 + 10 * (config.stages == 2) + config.rows)
            store.put(Task(op, case, variant), config, trial)
    monkeypatch.setattr("kerneltune.tune.run.run_tune", lambda *_: [TuningResult("tuned", "an entry")])
    result = CliRunner().invoke(app, ["tune", "rmsnorm", "--results", str(tmp_path), "--configs", str(tmp_path / "c")])
    assert result.exit_code == 0, result.output
    title, near_line, matter, dead, few = result.stdout.splitlines()
    trials, spilling = i + 1, (i + 1) // 5
    statuses = f"{2 * (trials - spilling)} passed, {2 * spilling} spills"
    assert title == f"rmsnorm_bwd optimized none: 2 cases, {2 * trials} trials ({statuses})"
    assert near_line.startswith("  within 2 % of the best after 2 ")
    assert f" of {i + 1} trials (median; worst 2); " in near_line
    assert matter.startswith("  knobs that matter: stages ")
    assert dead.startswith("  never within 2 %: stages=2 (-")
    assert few == "  1 config keeps every case (2) within 2 % of its best (worst 0.0 %)"


def test_set_cover_without_a_solution_in_time_has_the_best_config_of_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insight, "milp", lambda *_, **__: SimpleNamespace(x=None, status=1))
    first, second, third = ((("block", block),) for block in (1, 2, 3))
    cases = [{first: 1.0, second: 1.5, third: 1.01}, {second: 2.0, third: 2.03}]
    assert set_cover(cases) == ([first, second], 0.0, False)


@pytest.mark.parametrize(
    ("statuses", "code", "out", "err"),
    [
        (["kept"] * 3, 0, "nothing to tune: 3 cases have configs (--force searches again)\n", ""),
        ([], 0, "nothing to tune: no selected variant has knobs\n", ""),
        (["kept", "tuned", "skipped"], 0, "", ""),
        (["measured", "skipped"], 0, "", ""),
        (["tuned", "failed"], 1, "", "1 of 2 cases not tuned\n"),
    ],
)
def test_tune_command_prints_counts_and_fails_if_a_case_failed(
    statuses: list[Any], code: int, out: str, err: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kerneltune.tune.run.run_tune", lambda *_: [TuningResult(status) for status in statuses])
    result = CliRunner().invoke(app, ["tune", "rmsnorm", "--results", str(tmp_path), "--configs", str(tmp_path)])
    served = f"programs use these configs where KERNELTUNE_CONFIGS={tmp_path} is set\n" if "tuned" in statuses else ""
    assert (result.exit_code, result.stdout) == (code, out)
    assert " ".join(result.stderr.split()) == (served + err).replace("\n", " ").strip()


def test_trials_command_without_trials_names_the_folder(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["trials", "rmsnorm", "--gpu", "gone", "--results", str(tmp_path)])
    output = " ".join(result.stdout.split())
    expected = f"no trials of rmsnorm in {tmp_path}/runs/trials/gone: `kerneltune tune rmsnorm` makes them, on a GPU"
    assert (result.exit_code, output) == (0, expected)


def test_trials_command_without_trials_names_the_gpus_that_have_some(tmp_path: Path) -> None:
    ops_of = {"nvidia_h200": "rmsnorm_fwd", "nvidia_b200": "rmsnorm_bwd", "nvidia_a100": "swiglu", "gone": "rmsnorm_fwd"}
    for gpu, op in ops_of.items():
        path = trials_file(tmp_path, gpu, op)
        path.parent.mkdir(parents=True)
        path.touch()
    result = CliRunner().invoke(app, ["trials", "rmsnorm", "--gpu", "gone", "--results", str(tmp_path)])
    assert result.exit_code == 0
    assert "gone: read those of --gpu nvidia_b200 or --gpu nvidia_h200, or `kerneltune tune" in " ".join(result.stdout.split())
