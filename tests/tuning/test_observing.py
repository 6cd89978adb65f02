"""Times of rivals: which configs are timed on which cases, and what is kept of them."""

from collections.abc import Iterator
from pathlib import Path

import made_up_gpu
import pytest
from made_up_gpu import H200, OPS, time_us

from kerneltune.plan import Options, Quiet
from kerneltune.search.observations import path_of, read
from kerneltune.search.task import Task
from kerneltune.spec import Case
from kerneltune.tuning import observing
from kerneltune.tuning.observing import Asked, observe
from kerneltune.tuning.transfer import donors_of, rivals

STREAM, BASELINE = OPS["stream"], OPS["stream"].variant("baseline")


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with made_up_gpu.stands_in(monkeypatch):
        monkeypatch.setattr(observing, "obstacle", lambda *_: None)
        yield


def asked(size: int) -> Asked:
    case = Case(f"s{size}", (("read", size), ("write", size)), "int32")
    donors = donors_of(STREAM, BASELINE, "cold", H200.slug, None)
    return Task(STREAM, case, BASELINE), rivals(STREAM, BASELINE, case, donors, 6)


def test_observe_two_cases_keeps_every_time_of_each(tmp_path: Path) -> None:
    cases = [asked(1 << 20), asked(1 << 24)]
    assert all(len(configs) == 6 for _, configs in cases)
    assert observe(cases, Options(results=tmp_path), Quiet()) == 2
    found = read(path_of("stream", H200.slug, tmp_path), STREAM)
    assert len(found.runs) == 1
    assert len(found.rows) == 12
    for row in found.rows:
        assert row.time_us == pytest.approx(time_us(BASELINE.config_from(dict(row.knobs))), rel=1e-4)
    assert {row.case for row in found.rows} == {task.case for task, _ in cases}


def test_observe_again_keeps_one_time_of_a_config_and_the_runs_that_are_used(tmp_path: Path) -> None:
    for _ in range(2):
        observe([asked(1 << 20)], Options(results=tmp_path), Quiet())
    observe([asked(1 << 22)], Options(results=tmp_path), Quiet())
    found = read(path_of("stream", H200.slug, tmp_path), STREAM)
    assert len(found.runs) <= 2  # one where the last two began in the same second
    assert {row.run for row in found.rows} == set(range(len(found.runs)))
    assert len(found.rows) == 12


def test_observe_that_is_interrupted_keeps_the_cases_before(tmp_path: Path) -> None:
    class Interrupts(Quiet):
        def advance(self, text: str) -> None:
            if "s4194304" in text:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe([asked(1 << 20), asked(1 << 22)], Options(results=tmp_path), Interrupts())
    found = read(path_of("stream", H200.slug, tmp_path), STREAM)
    assert {row.axes for row in found.rows} == {asked(1 << 20)[0].case.axes}
    assert len(found.rows) == 6


def test_observe_over_budget_begins_no_further_case(tmp_path: Path) -> None:
    assert observe([asked(1 << 20), asked(1 << 22)], Options(results=tmp_path, budget_s=1e-9), Quiet()) == 0
    assert not path_of("stream", H200.slug, tmp_path).exists()
