"""A look-up: for every operator, a sweep without tuning runs the config that a call without `config=` runs."""

import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache as cache_
from typing import Any

import pytest

from kerneltune import cache, device, ops, sweep_file, workloads
from kerneltune.cache import Chooser
from kerneltune.checking.declarations import before_look_ups
from kerneltune.files import data_root
from kerneltune.spec import Case, Op
from kerneltune.task import Task

GPU = "nvidia_h200"
ALL = {name: op for name, op in ops.load().items() if name != "stream"}
OPS = {name: op for name, op in ALL.items() if op.variant("optimized").config is not None}
SWEEPS = data_root("sweeps")
CASES = 5


class _AskedError(Exception):
    """Raised where a call has its config, so that nothing is launched."""


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device, "current_slug", lambda: GPU)
    cache.clear()
    yield
    cache.clear()


@cache_
def bench() -> dict[str, list[Case]]:
    """Return the bench cases of every operator."""
    cases_of: dict[str, list[Case]] = {}
    for path in sorted(SWEEPS.glob("*.yaml")):
        for entry in sweep_file.load(path, ALL | workloads.load()).bench:
            cases_of.setdefault(entry.op, []).append(entry.case)
    return cases_of


def random_case(op: Op, rng: random.Random) -> Case:
    """Change a case of the sweeps: half of the time the size of a free axis, and options and type of any kind."""
    sizes = dict(rng.choice(bench()[op.name]).axes)
    if op.free_axes and rng.random() < 0.5:
        axis = rng.choice(op.free_axes)
        sizes[axis] = max(1, sizes[axis] * rng.randint(1, 5) // 2)
    options = tuple((name, rng.choice(offered)) for name, offered in op.options.items())
    return Case("random", tuple(sizes.items()), rng.choice(op.dtypes), rng.choice(op.quants), options)


def called_with(op: Op, case: Case) -> tuple[Case, Any]:
    """Return the case that a call on inputs without values looks up, and its config."""
    answers: list[tuple[Case, Any]] = []

    def end_call(chooser: Chooser, wanted: Case) -> None:
        if chooser.op is op:
            answers.append((wanted, chooser.find(wanted).config))
            raise _AskedError

    with before_look_ups(end_call), pytest.raises(_AskedError):
        op.variant("optimized").run(op.inputs(case, device="meta"), None)
    return answers[0]


@pytest.mark.filterwarnings("ignore::kerneltune.misses.CacheMissWarning")
@pytest.mark.parametrize("name", OPS)
def test_sweep_without_tuning_runs_configs_of_calls(name: str) -> None:
    op, rng = OPS[name], random.Random(name)
    variant = op.variant("optimized")
    for case in (random_case(op, rng) for _ in range(CASES)):
        wanted, config = called_with(op, case)
        assert wanted == op.case_of_call(case), case.label
        assert config == Task(op, case, variant).config_of_call(), case.label


UNNAMED = (1, 2, 3, 17, 96, 112, 333, 1000, 1664, 2560, 3328, 5376, 9216, 18944, 20000)


@pytest.mark.parametrize("name", OPS)
def test_look_up_of_random_sizes_returns_a_valid_config_and_its_source(name: str) -> None:
    op, rng = OPS[name], random.Random(name)
    variant = op.variant("optimized")
    chooser, served = Chooser.of(op, variant), 0
    for _ in range(300):
        sizes = {axis: rng.choice(UNNAMED[:8] if axis in "EGT" else UNNAMED) for axis in op.axes}
        sizes |= {"M": rng.choice((1, 999, 20001, 262143, 4194304))} if "M" in sizes and rng.random() < 0.5 else {}
        options = tuple((option, rng.choice(offered)) for option, offered in op.options.items())
        case = op.case_of_call(Case("unnamed", tuple(sizes.items()), rng.choice(op.dtypes), rng.choice(op.quants), options))
        if math.prod(sizes.values()) > 1 << 44 or variant.unsupported(case) is not None:
            continue
        choice = chooser.find(case)
        assert variant.invalid(case, choice.config) is None, case.label
        assert bool(choice.describe()) == (choice.source.name != "own")
        served += 1
    assert served >= 8


def seconds_of_a_loop() -> float:
    """Time a loop that takes 45 µs on a machine where the first look-up of a shape takes 9 to 40 µs."""
    begun, total = time.thread_time(), 0
    for number in range(2000):
        total += number
    return time.thread_time() - begun


def seconds_of_a_first_call(chooser: Chooser, case: Case) -> float:
    begun = time.thread_time()
    chooser(case.axes, case.dtype, case.quant, case.options)
    return time.thread_time() - begun


@pytest.mark.filterwarnings("ignore::kerneltune.misses.CacheMissWarning")
@pytest.mark.parametrize("name", OPS)
def test_first_look_up_of_a_shape_takes_at_most_a_short_loop(name: str) -> None:
    op, rng = OPS[name], random.Random(name)
    chooser = Chooser.of(op, op.variant("optimized"))
    cases = [random_case(op, rng) for _ in range(150)]  # of which a variant may support few
    for case in cases:
        chooser(case.axes, case.dtype, case.quant, case.options)  # reads the files of every quant mode
    shares = []
    for case in cases:
        sizes = {axis: size + (0 if axis in "EGT" else 16 * rng.randint(1, 99)) for axis, size in case.axes}
        new = op.case_of_call(replace(case, axes=tuple(sizes.items())))
        if op.variant("optimized").unsupported(new) is None:
            shares.append(seconds_of_a_first_call(chooser, new) / seconds_of_a_loop())
    assert statistics.median(shares) <= 1.5, shares
