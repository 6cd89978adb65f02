"""Likely refusals: told from other sizes, they come last and are tried all the same."""

from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import landscapes
import numpy as np
import pytest
from replayed import known as known_trials

from kerneltune.search.loop import Candidates, Search, explore
from kerneltune.search.task import Evaluation, Task, Trial
from kerneltune.search.trials import TrialStore
from kerneltune.spec import Case, Variant
from kerneltune.tune.candidates import REFUSED, probabilities, widened

SIZES = (("M", 4096), ("N", 4096))
SPACE = landscapes.space(3)
MAKE = make_dataclass("Knobs", [name for name, _ in next(iter(SPACE.trials))], frozen=True)


def config(rows: int, kind: str = "a") -> dict[str, Any]:
    return {"rows": rows, "kind": kind}


def test_nothing_is_said_where_nothing_is_known() -> None:
    assert probabilities(SIZES, [config(1)], []) is None


def test_the_nearest_configs_and_sizes_say_most() -> None:
    near, far = (("M", 8192), ("N", 4096)), (("M", 64), ("N", 65536))
    told = [(near, config(1), False), (near, config(8), True), (far, config(1), True), (near, config(4, "b"), True)]
    found = probabilities(SIZES, [config(1), config(2), config(8), config(4, "b")], told)
    assert found is not None
    assert found[0] > 0.9 > found[1] > 0.5 > found[2]
    assert found[3] < 0.5
    assert np.all((found >= 0) & (found <= 1))


def refused(told: bool, budget_s: float, seed: int) -> list[bool]:
    """Of a search of a made-up space, what of the evaluations, in their order; told of the same space at half the sizes."""
    other = tuple((axis, size // 2) for axis, size in SPACE.case.axes)
    known = [(other, dict(knobs), trial.status in REFUSED) for knobs, trial in list(SPACE.trials.items())[::2]]
    trials = {MAKE(**dict(knobs)): trial for knobs, trial in SPACE.trials.items()}
    found = probabilities(SPACE.case.axes, [dict(knobs) for knobs in SPACE.trials], known)
    assert found is not None
    believed = dict(zip(trials, map(float, found), strict=True)) if told else None
    search = Search(sampler="random", seed=seed) if budget_s else Search(trials=100, seed=seed)
    explored = explore(Candidates(list(trials), (), believed), search, known_trials(trials))
    return [trial.status in REFUSED for trial in explored.values()]


def test_a_search_that_was_told_compiles_fewer_that_are_refused() -> None:
    told, not_told = (sum(sum(refused(given, 0, seed)) for seed in range(4)) for given in (True, False))
    assert told <= 0.6 * not_told


def test_likely_refusals_come_last_and_none_is_left_out() -> None:
    order = refused(True, 60.0, 0)
    assert len(order) == len(SPACE.trials)
    assert sum(order) == sum(trial.status in REFUSED for trial in SPACE.trials.values())
    tail = order[-sum(order) :]
    assert np.mean(tail) > 0.8 > 0.1 > np.mean(order[: len(order) // 2])


def test_a_store_tells_of_other_sizes_only(tmp_path: Path) -> None:
    from made_up import SMALL, Small, op_of

    store, op = TrialStore(tmp_path / "trials.log"), op_of(SMALL)
    here, there = Case("a", (("M", 8),), "bfloat16"), Case("b", (("M", 64),), "bfloat16")
    half = Case("c", (("M", 64),), "float16")
    for case in (here, there, half):
        store.put(Task(op, case, SMALL), Small(64, 1), Evaluation("spills"))
    assert store.of_other_sizes(Task(op, here, SMALL)) == [
        Trial(Task(op, there, SMALL).key, (("block", 64), ("warps", 1)), Evaluation("spills"))
    ]


def postponed(annotation: str) -> Variant:
    """Return a variant whose config class is of a module with `from __future__ import annotations`."""
    code = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Knobs:\n"
    module: dict[str, Any] = {"__name__": __name__}
    exec(f"{code}    block: {annotation}\n", module)
    knobs = module["Knobs"]
    return Variant("optimized", dict, knobs, lambda _case: {"block": (64, 128)}, default=lambda _case: knobs(64))


def test_a_config_class_of_a_module_that_postpones_annotations_is_made_of_stored_and_given_values() -> None:
    variant, case = postponed("int"), Case("c", (("M", 8),), "bfloat16")
    assert variant.valid_config(case, {"block": 128}).block == 128
    assert [config.block for config in widened(variant, [("block", ("256",))]).configs(case)] == [64, 128, 256]
    with pytest.raises(ValueError, match="config of optimized: block: 'x': expected int"):
        variant.config_from({"block": "x"})


def test_a_config_class_of_an_unknown_type_is_one_line() -> None:
    with pytest.raises(ValueError, match="config of optimized: Knobs: name 'Integer' is not defined"):
        postponed("Integer").config_from({"block": 64})
