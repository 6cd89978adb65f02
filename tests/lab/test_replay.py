"""Measured spaces as files, and the search run again on them; the spaces of these tests are made up, the shipped ones are not."""

import gzip
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, make_dataclass, replace
from pathlib import Path

import landscapes
import numpy as np
import pebble
import pytest
from started import environment
from threadpoolctl import threadpool_info, threadpool_limits
from typer.testing import CliRunner

from kerneltune.cli import app
from kerneltune.files import data_root
from kerneltune.lab.replay import Answered, Gaps, gap_at, nearest_best, replay
from kerneltune.search import spaces
from kerneltune.search.loop import Asking, Search, explore, times_of
from kerneltune.search.surrogate import Surrogate
from kerneltune.search.task import Evaluation

SPACE = landscapes.space(0)
SHIPPED = spaces.find([], data_root("results"))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return spaces.write(tmp_path / "none" / "spaces", SPACE)


def test_a_space_comes_back_as_it_was_written(written: Path) -> None:
    again = spaces.read(written)
    assert list(again.trials) == list(SPACE.trials)
    assert again.default == SPACE.default
    assert again.axes == SPACE.axes
    for knobs, trial in SPACE.trials.items():
        read = again.trials[knobs]
        assert (read.status, read.resources, read.spill_bytes) == (trial.status, trial.resources, trial.spill_bytes)
        assert read.time_us == (None if trial.time_us is None else pytest.approx(trial.time_us, rel=1e-5))
    assert written.name == "made_up_optimized_made_up_0_bfloat16_none_cold.csv.gz"


def test_the_same_space_gives_the_same_bytes(written: Path, tmp_path: Path) -> None:
    assert spaces.write(tmp_path / "again", spaces.read(written)).read_bytes() == written.read_bytes()
    assert not list(written.parent.glob(".*"))


def broken(change: Callable[[str], str], path: Path) -> str:
    """Return what reading says of a file whose text is changed."""
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()).decode()).encode()))
    with pytest.raises(ValueError) as caught:
        spaces.read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"schema": 1', '"schema": 2', ":1: header: schema: 2: expected 1"),
        ('"op": "made_up", ', "", ":1: header: op: missing"),
        ("# {", "# [", ":1: header: '# ["),
        ('"axes": {', '"axes": 5, "x": {', ":1: header: axes: 5: expected object"),
        ('"knobs": {"rows"', '"knobs": {"class"', ":1: header: knobs: 'class': expected the name of a knob"),
        (
            '"default": {"rows"',
            '"default": {"x"',
            ":1: header: default: 'x, cols, warps, ctas, stages, reload': expected a value of rows, cols",
        ),
        ('"axes": {', '"axes": ' + "[" * 100_000, ":1: header: "),
        (
            "\n1,256,1,0,1,False,ok",
            '\n"' + "1" * 200_000 + '",256,1,0,1,False,ok',
            ":3: not a trial: field larger than field limit",
        ),
        ("\n1,256,1,0,1,False,ok", f"\n{'1' * 5000},256,1,0,1,False,ok", ":3: not a trial: '1111"),
        ("rows,cols,warps", "rows,columns,warps", ":2: columns: 'rows,columns,warps,ctas,stages,reload,status"),
        ("\n1,256,1,0,1,False,ok", "\n1,256,1,0,1,maybe,ok", ":3: not a trial: '1,256,1,0,1,maybe,ok,"),
        ("\n1,256,1,0,1,False,ok", "\n1,256,1,0,1,False,spills", ":3: not a trial: '1,256,1,0,1,False,spills,"),
        ("\n1,256,1,0,1,False,ok,", "\n1,256,1,0,1,False,ok,-", ":3: not a trial: '1,256,1,0,1,False,ok,-"),
    ],
)
def test_a_broken_space_is_named_with_its_line(old: str, new: str, message: str, written: Path) -> None:
    assert broken(lambda text: text.replace(old, new, 1), written).startswith(message)


def test_what_is_no_gzip_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"cannot read .*x.csv.gz"):
        spaces.read(path)


def test_a_gzip_of_three_megabytes_takes_no_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "bomb.csv.gz"
    once = gzip.compress(b"\0" * (10 << 20), 9)
    path.write_bytes(once * 290)  # 2.9 MB, 2.9 GB of text
    script = "import resource, sys; from pathlib import Path; from kerneltune.search import spaces\n"
    script += "limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    script += "try:\n    spaces.read(Path(sys.argv[1]))\nexcept ValueError as error:\n    print(error)\n"
    script += "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - limit) >> 10)"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, env=environment(), check=True
    )
    said, megabytes = done.stdout.splitlines()
    assert said == f"cannot read {path}: more than {64 << 20} bytes of text"
    assert int(megabytes) < 300


def test_a_replay_ends_at_the_optimum_when_the_space_is_used_up() -> None:
    small = replace(SPACE, trials=dict(list(SPACE.trials.items())[:60]))
    for sampler in ("ours", "random"):
        gaps = replay(small, sampler, 2)
        assert gaps.shape == (2, 60)
        assert np.all(gaps[:, -1] == 0.0)
        assert np.all(np.diff(gaps, axis=1) <= 0)
        assert gap_at(gaps, 61) is None


def test_a_replay_begins_with_the_default_and_the_best_of_the_nearest_space() -> None:
    near, far = landscapes.space(1), landscapes.space(3)
    assert nearest_best(SPACE, [SPACE, far, near], 1) == [min(near.feasible, key=lambda k: near.feasible[k])]
    assert nearest_best(SPACE, [replace(near, quant="fp8")]) == []
    default = SPACE.feasible[SPACE.default] / min(SPACE.feasible.values()) - 1
    assert replay(SPACE, "ours", 2, 1) == pytest.approx(np.array([[default], [default]]))


def test_a_space_without_a_time_is_refused() -> None:
    with pytest.raises(ValueError, match="no config has a time"):
        replay(replace(SPACE, trials={SPACE.default: Evaluation("wrong")}), "ours", 2)


def worse_than(chance: Gaps, gaps: Gaps, budgets: Sequence[int]) -> list[int]:
    """Return the budgets at which the gap is surely above that of chance: early on both often stand at the same config."""
    both = [(n, gap_at(chance, n), gap_at(gaps, n)) for n in budgets]
    return [n for n, a, b in both if a is not None and b is not None and b.low > a.high]


@pytest.mark.parametrize("seed", range(3))
def test_the_search_beats_chance_on_made_up_spaces(seed: int) -> None:
    space = landscapes.space(seed)
    chance, found = replay(space, "random", 12, 100), replay(space, "ours", 3, 100)
    assert worse_than(chance, found, (25,)) == []
    for evaluations, bound in ((50, 0.05), (100, 0.03)):
        gap, by_chance = gap_at(found, evaluations), gap_at(chance, evaluations)
        assert gap is not None
        assert by_chance is not None
        assert gap.median <= min(bound, by_chance.median / 2)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_the_search_reaches_the_optimum_of_the_shipped_spaces(path: Path) -> None:
    """Median gap at most 3 % at 50 evaluations and 1 % at a quarter of the space, at no budget more than that of chance."""
    space = spaces.read(path)
    quarter = len(space.trials) // 4
    early, late, chance = replay(space, "ours", 30, 50), replay(space, "ours", 1, quarter), replay(space, "random", 25, quarter)
    assert worse_than(chance, early, (10, 25)) == []
    for gaps, evaluations, bound in ((early, 25, np.inf), (early, 50, 0.03), (late, quarter, 0.01)):
        gap, by_chance = gap_at(gaps, evaluations), gap_at(chance, evaluations)
        assert gap is not None
        assert by_chance is not None
        assert gap.median <= min(by_chance.median, bound), evaluations


def test_configs_like_a_guess_are_drawn_sooner_and_by_the_seed() -> None:
    make = make_dataclass("Knobs", [name for name, _ in next(iter(SPACE.trials))], frozen=True)
    pool = [make(**dict(knobs)) for knobs in SPACE.trials]
    guess = pool[7]

    def drawn(sampler: str, seed: int, first: Sequence[object]) -> list[int]:
        """In how many knobs each of the first configs differs from the guess."""
        asking = Asking(pool, first, Search(trials=20, sampler=sampler, seed=seed))
        asked = [asking.ask() for _ in range(9)]
        return [sum(a != b for a, b in zip(astuple(config), astuple(guess), strict=True)) for config in asked if config]

    near, far = (np.mean([drawn(name, seed, [guess])[1:] for seed in range(20)]) for name in ("ours", "random"))
    assert drawn("ours", 3, [guess])[0] == 0
    assert near < far - 0.5
    assert drawn("ours", 3, [guess]) == drawn("ours", 3, [guess]) != drawn("ours", 4, [guess])
    without = np.mean([drawn("ours", seed, []) for seed in range(20)])
    assert abs(without - far) < 0.3


def test_the_surrogate_computes_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLAS on all cores takes several times as long for matrices of this size."""
    threads: list[int] = []

    def seen(_self: Surrogate, *_arguments: object) -> None:
        threads.extend(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")

    monkeypatch.setattr(Surrogate, "_fit_scales", seen)
    surrogate = Surrogate([dict(knobs) for knobs in SPACE.trials])
    with threadpool_limits(2, "blas"):
        surrogate.fit([0, 1], [10.0, 11.0])
    assert threads
    assert set(threads) == {1}


def test_a_search_ends_when_little_is_left_to_gain() -> None:
    configs = list(SPACE.trials)

    make = make_dataclass("Knobs", [name for name, _ in configs[0]], frozen=True)
    trials = {make(**dict(knobs)): trial for knobs, trial in SPACE.trials.items()}
    found = explore(list(trials), (), Search(until_gain=0.01), lambda config: Answered(trials[config]))
    assert 16 <= len(found) < len(trials) / 2
    assert min(times_of(found).values()) <= 1.05 * min(SPACE.feasible.values())


def test_gaps_before_the_first_time_count_as_large() -> None:
    interval = gap_at(np.array([[np.inf, 0.5, 0.0]] * 3), 1)
    assert interval is not None
    assert interval.median > 9


# the command


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["lab", "replay", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_replay_prints_a_table_for_each_space(written: Path, tmp_path: Path) -> None:
    code, out, _ = run("--results", tmp_path, "--seeds", 2, "--sampler", "random", "made_up")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "made_up_optimized_made_up_0_bfloat16_none_cold"
    assert lines[1] == "1134 of 1204 configs have a time; none, never, commit none"
    assert "sampler" in lines[2]
    assert "@301" in lines[2]
    assert lines[3].startswith("random")
    assert run("--results", tmp_path, "--seeds", 2, "--sampler", "random", written)[1] == out


def test_replay_finds_the_same_on_one_core_and_on_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = spaces.write(tmp_path / "small", replace(SPACE, trials=dict(list(SPACE.trials.items())[:40])))
    started: list[int] = []
    pool = pebble.ProcessPool
    monkeypatch.setattr(pebble, "ProcessPool", lambda count, **how: started.append(count) or pool(count, **how))

    def tables(cores: int) -> str:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
        code, out, err = run("--seeds", 3, "--sampler", "ours,random", small)
        assert code == 0
        assert err.splitlines()[-1].startswith("search: 6 of 6 steps in ")
        return out

    assert tables(2) == tables(1)
    assert started == [2]


def test_replay_says_what_it_is_at_and_keeps_nothing_when_interrupted(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--results", tmp_path, "--seeds", 2, "--sampler", "random", written)
    assert run(*arguments)[2].splitlines()[-1].startswith("search: 2 of 2 steps in ")  # a slow machine says more before

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kerneltune.lab.replay.replay", interrupted)
    code, _, err = run(*arguments)
    assert (code, err.splitlines()[-1]) == (130, "interrupted")


def test_replay_refuses_what_is_unknown(written: Path, tmp_path: Path) -> None:
    code, _, err = run("--results", tmp_path, "nothing")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith("error: space: 'nothing': expected a file, or a part of one of made")
    assert run("--sampler", "cma", written)[2] == "error: sampler: 'cma': expected one of ours, random\n"
    assert run("--seeds", 1, written)[2] == "error: seeds: 1: expected 2 or more\n"
    assert run(tmp_path / "none.csv.gz")[2].startswith(f"error: cannot read {tmp_path}/none.csv.gz")


def test_replay_finds_the_shipped_spaces_outside_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kerneltune.sweep.in_checkout", lambda: False)
    code, out, _ = run("--seeds", 2, "--sampler", "random", "fp8_transpose")
    assert (code, out.split("_optimized")[0]) == (0, "fp8_transpose_2d")


def test_replay_without_spaces_says_where_it_looked(tmp_path: Path) -> None:
    assert run("--results", tmp_path)[:2] == (0, f"no measured spaces in {tmp_path}/*/spaces\n")
