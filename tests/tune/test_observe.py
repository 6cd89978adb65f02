"""Times of rivals: which configs are timed on which cases, and what is kept of them."""

from collections.abc import Iterator
from pathlib import Path

import made_up_gpu
import pytest
from asserting import every
from made_up_gpu import H200, OPS, time_us

from kerneltune.rules.transfer import donors_of, rivals
from kerneltune.run_options import Options, Quiet
from kerneltune.search.task import Task
from kerneltune.search.trial_table import read, table_path
from kerneltune.spec import Case
from kerneltune.tune.observe import Asked, observe

STREAM, BASELINE = OPS["stream"], OPS["stream"].variant("baseline")


@pytest.fixture(autouse=True)
def an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with made_up_gpu.stands_in(monkeypatch):
        monkeypatch.setattr("kerneltune.tune.observe.obstacle", lambda *_: None)
        yield


def asked(size: int) -> Asked:
    case = Case(f"s{size}", (("read", size), ("write", size)), "int32")
    donors = donors_of(STREAM, BASELINE, "cold", H200.slug, None)
    return Task(STREAM, case, BASELINE), rivals(STREAM, BASELINE, case, donors, 6)


def test_observe_two_cases_keeps_every_time_of_each(tmp_path: Path) -> None:
    cases = [asked(1 << 20), asked(1 << 24)]
    assert every(len(configs) == 6 for _, configs in cases)
    assert observe(cases, Options(results=tmp_path), Quiet()) == 2
    (block,) = read(table_path(tmp_path, H200.slug, "stream"))
    assert (block.variant, block.device, block.source_hash) == ("baseline", H200.name, BASELINE.source_hash)
    assert len(block.rows) == 12
    for _, knobs, trial in block.rows:
        assert trial.time_us == pytest.approx(time_us(BASELINE.config_from(dict(knobs))), rel=1e-4)
    assert {case for case, *_ in block.rows} == {task.case for task, _ in cases}


def test_observe_again_adds_no_trial_that_the_file_has(tmp_path: Path) -> None:
    path = table_path(tmp_path, H200.slug, "stream")
    observe([asked(1 << 20)], Options(results=tmp_path), Quiet())
    before = path.read_bytes()
    observe([asked(1 << 20)], Options(results=tmp_path), Quiet())
    assert path.read_bytes() == before
    observe([asked(1 << 22)], Options(results=tmp_path), Quiet())
    assert sum(len(block.rows) for block in read(path)) == 12


def test_observe_that_is_interrupted_keeps_the_cases_before(tmp_path: Path) -> None:
    class Interrupts(Quiet):
        def advance(self, text: str) -> None:
            if "s4194304" in text:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe([asked(1 << 20), asked(1 << 22)], Options(results=tmp_path), Interrupts())
    (block,) = read(table_path(tmp_path, H200.slug, "stream"))
    assert [case.axes for case, *_ in block.rows] == [asked(1 << 20)[0].case.axes] * 6


def test_observe_over_budget_begins_no_further_case(tmp_path: Path) -> None:
    assert observe([asked(1 << 20), asked(1 << 22)], Options(results=tmp_path, budget_s=1e-9), Quiet()) == 0
    assert not table_path(tmp_path, H200.slug, "stream").exists()
