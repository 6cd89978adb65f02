"""The study: its decisions on simulated processes, what it keeps, its table; planted delays with a clock that is pretended."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from simulated import one_process, rounds_us
from typer.testing import CliRunner

from kerneltune import device, ops
from kerneltune.cli import app
from kerneltune.lab import planted, study
from kerneltune.lab.study import Process, decide
from kerneltune.records import Record
from kerneltune.search.task import Task
from kerneltune.spec import Case

DELAYS = (0.02, 0.05, 0.1)


def simulated(processes: int, rows: int, delays: tuple[float, ...] = DELAYS) -> list[Process]:
    """Make processes that each timed every row with every delay, in the same rounds."""
    rng = np.random.default_rng(0)
    found: list[Process] = []
    for _ in range(processes):
        plain = [rounds_us(rng, us) for us in np.linspace(20, 200, rows)]
        process: dict[float, list[Record]] = {}
        for delay in (0.0, *delays):
            noise = [np.exp(0.001 * rng.standard_normal(rounds.size)) if delay else 1.0 for rounds in plain]
            process[delay] = [one_process(r * (1 + delay) * n, i) for i, (r, n) in enumerate(zip(plain, noise, strict=True))]
        found.append(process)
    return found


def test_decisions_are_counted_by_delay() -> None:
    none, two, five, ten = decide(simulated(9, 40), per_side=3, repeats=10, margin=0.03)
    assert [row.planted for row in (none, two, five, ten)] == [0.0, *DELAYS]
    assert [row.rows for row in (none, two, five, ten)] == [400, 40, 40, 40]
    assert none.part("regression", "faster") == 0.0
    assert two.part("regression", "faster") == 0.0
    assert five.part("regression") >= 0.95
    assert ten.part("regression") == 1.0
    assert [row.measured for row in (none, two, five, ten)] == [0.0, *(pytest.approx(delay, abs=0.001) for delay in DELAYS)]
    assert none.part("pass") > 0.95


def test_rows_too_short_for_the_delay_are_counted_apart() -> None:
    rng = np.random.default_rng(1)
    pool: list[Process] = []
    for _ in range(9):
        plain = [rounds_us(rng, us) for us in (4.0, 40.0)]
        pool.append({d: [one_process(r * (1 + d), i) for i, r in enumerate(plain)] for d in (0.0, 0.1)})
    none, ten = decide(pool, per_side=3, repeats=40, margin=0.03)
    assert none.short == 0
    assert none.caught == 0.0
    assert 5 < ten.short < 35, "a row of 4 µs becomes 0.4 µs slower"
    assert ten.counts["regression"] == ten.rows - ten.short
    assert ten.caught == 1.0


def test_decisions_follow_the_seed_and_the_margin() -> None:
    pool = simulated(9, 12)
    first, again, other = (decide(pool, per_side=3, repeats=3, margin=0.001, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    strict = decide(pool, per_side=3, repeats=3, margin=0.001)
    assert strict[1].part("regression") > 0.9


def test_too_few_processes_and_nothing_measured() -> None:
    with pytest.raises(ValueError, match=r"^processes: 8: expected 9 or more: a baseline, a new run and a second one$"):
        decide(simulated(8, 1), per_side=3, repeats=1, margin=0.03)
    with pytest.raises(ValueError, match=r"^nothing measured: no selected row can be timed here$"):
        decide([{0.0: []}] * 3, per_side=1, repeats=1, margin=0.03)


def test_what_is_kept_is_read_back(tmp_path: Path) -> None:
    pool = simulated(3, 2)
    study.save(tmp_path / "kept", pool)
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [
        f"planted_{delay}.jsonl" for delay in ("0.0", "0.02", "0.05", "0.1")
    ]
    assert study.saved(tmp_path / "kept") == pool
    with pytest.raises(ValueError, match=r"^cannot read .*planted_0.0.jsonl: no such file$"):
        study.saved(tmp_path)
    path = tmp_path / "kept" / "planted_0.05.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match=r"planted_0.05.jsonl: rows: 5: expected the same ones of every process$"):
        study.saved(tmp_path / "kept")


def test_the_command_decides_on_what_was_kept(tmp_path: Path) -> None:
    study.save(tmp_path / "kept", simulated(3, 10, (0.1,)))
    arguments = ["lab", "study", "--from", tmp_path / "kept", "--per-side", "1", "--repeats", "2"]
    result, *written = (
        CliRunner().invoke(app, [str(a) for a in (*arguments, *more)])
        for more in ((), ("--format", "markdown", "-o", tmp_path / "t.md"), ("--format", "csv", "-o", tmp_path / "t.csv"))
    )
    assert [one.exit_code for one in (result, *written)] == [0] * 3, result.output
    head, none, ten = result.stdout.splitlines()
    assert head.split()[:6] == ["planted", "measured", "rows", "short", "caught", "regression"]
    assert none.split()[:8] == ["0", "%", "0.00", "%", "20", "0", "0.00", "%"]
    assert ten.split()[0] == "10"
    markdown, csv = (tmp_path / "t.md").read_text(), (tmp_path / "t.csv").read_text()
    assert markdown.startswith(
        "| planted | measured | rows | short | caught | regression | ambiguous | slower | pass | faster |\n| ---: |"
    )
    assert csv.splitlines()[0] == (
        "planted_pct,measured_pct,rows,short,caught_pct,regression,ambiguous,slower,pass,faster,failed,missing,note"
    )
    assert [line.split(",")[::2][:2] for line in csv.splitlines()[1:]] == [["0.0", "20"], ["10.0", "2"]]
    few = CliRunner().invoke(app, ["lab", "study", "rmsnorm", "--processes", "8"])
    assert (few.exit_code, few.stderr) == (2, "error: processes: 8: expected 9 or more\n")
    wrong = CliRunner().invoke(app, ["lab", "study", "rmsnorm", "--delay", "0"])
    assert (wrong.exit_code, wrong.stderr) == (2, "error: delay: 0.0: expected 0.001 or more\n")


class Clock:
    """A device on which a spin of c cycles takes c / 1000 µs after a launch of 2 µs."""

    def __init__(self) -> None:
        self.spins: list[int] = []
        self.us = 0.0

    def sleep(self, cycles: int) -> None:
        self.spins.append(cycles)
        self.us += 2.0 + cycles / 1000


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")
def test_the_planted_delay_is_the_part_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    class Timed:
        """A contender whose calls take 10 µs."""

        def __init__(self, run: Callable[[int], Any], sets: int, after: Callable[[int], None] | None = None) -> None:
            self.run, self.after, self.calls = run, after, 40

        def sample_us(self) -> float:
            clock.us = 10.0 * self.calls
            if self.after:
                self.after(self.calls)
            return clock.us / self.calls

    def sleeper(run: Callable[[int], Any], _sets: int, _policy: object) -> Any:
        class Spin:
            def sample_us(self) -> float:
                clock.us = 0.0
                run(0)
                return clock.us

        return Spin()

    monkeypatch.setattr(torch.cuda, "_sleep", clock.sleep)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(planted, "Contender", sleeper)
    monkeypatch.setattr(planted, "obstacle", lambda *_: None)
    monkeypatch.setattr(planted, "input_sets", lambda *_: [{}])
    monkeypatch.setattr(planted, "contender", lambda v, c, i, p, after=None: Timed(lambda _: None, 1, after))
    monkeypatch.setattr(planted, "time_contenders", lambda cs: {n: np.array([c.sample_us()] * 5) for n, c in cs.items()})
    h200 = device.Device("NVIDIA H200", "sm_90", 132, 60_000_000, "580")
    monkeypatch.setattr(device, "current", lambda: h200)
    op = ops.load()["stream"]
    case = Case("c", (("read", 4096), ("write", 4096)), "int32")
    variant = op.variants[0]
    found = planted.measure_planted("f", Task(op, case, variant), variant.default_config(case), DELAYS)
    assert list(found) == [0.0, *DELAYS]
    assert [row.time_us for row in found.values()] == [pytest.approx(us, rel=1e-4) for us in (10.0, 10.2, 10.5, 11.0)]
    assert {row.aa_floor for row in found.values()} == {0.0}
    assert [list(rounds) for rounds in found[0.0].samples_us or ()] == [[10.0] * 5]
