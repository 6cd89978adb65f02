"""The gate's verdicts on simulated processes with planted slowdowns, and planted delays under a simulated clock."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import planted_slowdowns as planted
import pytest
import torch
from planted_slowdowns import Process, decide
from simulated_records import one_process, rounds_us

from kerneltune import device, ops
from kerneltune.records import Record, append
from kerneltune.spec import Case
from kerneltune.task import Task

DELAYS = (0.02, 0.05, 0.1)


def simulated(processes: int, rows: int, delays: tuple[float, ...] = DELAYS) -> list[Process]:
    """Make processes that each timed every row with every delay, in the same rounds."""
    rng = np.random.default_rng(0)
    simulated_processes: list[Process] = []
    for _ in range(processes):
        plain = [rounds_us(rng, us) for us in np.linspace(20, 200, rows)]
        process: dict[float, list[Record]] = {}
        for delay in (0.0, *delays):
            noise = [np.exp(0.001 * rng.standard_normal(rounds.size)) if delay else 1.0 for rounds in plain]
            process[delay] = [one_process(r * (1 + delay) * n, i) for i, (r, n) in enumerate(zip(plain, noise, strict=True))]
        simulated_processes.append(process)
    return simulated_processes


def test_decide_counts_decisions_by_delay() -> None:
    none, two, five, ten = decide(simulated(9, 40), per_side=3, repeats=10, margin=0.03)
    assert [row.delay for row in (none, two, five, ten)] == [0.0, *DELAYS]
    assert [row.rows for row in (none, two, five, ten)] == [400, 40, 40, 40]
    assert none.counts["regression"] + none.counts["faster"] == 0
    assert two.counts["regression"] + two.counts["faster"] == 0
    assert five.counts["regression"] >= 0.95 * five.rows
    assert ten.counts["regression"] == ten.rows
    assert [row.measured for row in (none, two, five, ten)] == [0.0, *(pytest.approx(delay, abs=0.001) for delay in DELAYS)]
    assert none.counts["pass"] > 0.95 * none.rows


def test_decide_counts_rows_too_short_for_the_delay() -> None:
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


def test_decide_depends_on_seed_and_margin() -> None:
    pool = simulated(9, 12)
    first, again, other = (decide(pool, per_side=3, repeats=3, margin=0.001, seed=seed) for seed in (0, 0, 1))
    assert first == again != other
    strict = decide(pool, per_side=3, repeats=3, margin=0.001)
    assert strict[1].counts["regression"] > 0.9 * strict[1].rows


def test_decide_with_too_few_processes_raises() -> None:
    with pytest.raises(ValueError, match=r"^8 processes: expected 9 or more: baseline, new run and one repetition$"):
        decide(simulated(8, 1), per_side=3, repeats=1, margin=0.03)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write what twelve processes measured."""
    for process in simulated(12, 3):
        for delay, records in process.items():
            append(tmp_path / f"planted_{delay}.jsonl", records)
    return tmp_path


def test_measured_processes_are_read_and_decided_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    processes = planted.load_processes(folder)
    assert (len(processes), [len(records) for records in processes[0].values()]) == (12, [3] * 4)
    planted.main(["decide", str(folder), "--repeats", "2"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:6] == ["planted", "measured", "caught", "rows", "short", "failed"]
    assert [row.split()[0] for row in rows] == ["0.00", "2.00", "5.00", "10.00"]


def test_files_of_different_rows_raise(folder: Path) -> None:
    path = folder / "planted_0.05.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match=r"planted_0.05.jsonl: 35 rows: expected the same rows for every process$"):
        planted.load_processes(folder)


class Clock:
    """A device on which a spin of c cycles takes c / 1000 µs after a launch of 2 µs."""

    def __init__(self) -> None:
        self.spins: list[int] = []
        self.us = 0.0

    def sleep(self, cycles: int) -> None:
        self.spins.append(cycles)
        self.us += 2.0 + cycles / 1000


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")
def test_planted_delay_is_the_given_fraction_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(planted, "why_not_timed", lambda *_: None)
    monkeypatch.setattr(planted, "input_sets", lambda *_: [{}])
    monkeypatch.setattr(planted, "contender", lambda v, c, i, p, after=None: Timed(lambda _: None, 1, after))
    monkeypatch.setattr(planted, "time_contenders", lambda cs: {n: np.array([c.sample_us()] * 5) for n, c in cs.items()})
    h200 = device.Device("NVIDIA H200", "sm_90", 132, 60_000_000, "580")
    monkeypatch.setattr(device, "current", lambda: h200)
    op = ops.load()["stream"]
    case = Case("c", (("read", 4096), ("write", 4096)), "int32")
    variant = op.variants[0]
    rows = planted.measure_task("f", Task(op, case, variant), variant.default_config(case), DELAYS)
    assert list(rows) == [0.0, *DELAYS]
    assert [row.time_us for row in rows.values()] == [pytest.approx(us, rel=1e-4) for us in (10.0, 10.2, 10.5, 11.0)]
    assert {row.aa_floor for row in rows.values()} == {0.0}
    assert [list(rounds) for rounds in rows[0.0].samples_us or ()] == [[10.0] * 5]
