"""Configs of the cache that outlived the knobs or the limits that they were stored for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_tuner import CASE, HALF, Small, nothing, op_of, small_space

from kerneltune import cache, device
from kerneltune.plan import Options
from kerneltune.search.trials import TrialStore
from kerneltune.spec import Case, Variant
from kerneltune.task import Task
from kerneltune.tune.candidates import candidates

REFUSED = {1: None, 2: None, 4: None, 8: None}
VARIANT = Variant(
    "optimized",
    nothing,
    Small,
    small_space,
    invalid=lambda _case, config: (
        "too wide" if config.block > 512 or 512 % config.block else REFUSED.get(config.warps, "unknown warps")
    ),
    default=lambda _case: Small(256, 4),
)
STALE: list[dict[str, Any]] = [{"block": 64}, {"block": 64, "warps": 4, "gone": 1}, {"block": "64", "warps": 4}]
UNFIT = {"block": 1024, "warps": 4}
ABSURD = {"block": 0, "warps": 4}
UNKNOWN = {"block": 64, "warps": 3}
GOOD = {"block": 64, "warps": 2}


@pytest.fixture
def options(tmp_path: Path) -> Options:
    cache.use_root(tmp_path)
    return Options()


def store(config: dict[str, Any], case: Case = CASE, slug: str = "") -> None:
    entry = cache.CacheEntry(op="fake", variant="optimized", case=case, policy="cold", config=config)
    cache.store(slug or device.current().slug, entry)


@pytest.mark.parametrize("config", [*STALE, UNFIT, ABSURD, UNKNOWN])
def test_own_entry_skips_an_entry_that_is_no_longer_valid(config: dict[str, Any], options: Options, tmp_path: Path) -> None:
    op = op_of(VARIANT)
    store(config)
    assert Task(op, CASE, VARIANT).own_entry() is None
    assert Task(op, CASE, VARIANT).config_of_call() == Small(256, 4)
    store(GOOD, HALF)
    assert Task(op, CASE, VARIANT).own_entry() is None  # it is of another type
    assert Task(op, CASE, VARIANT).config_of_call() == Small(64, 2)
    trials = TrialStore(tmp_path / "trials.log")
    assert candidates(Task(op, CASE, VARIANT), trials, options).first == [Small(256, 4), Small(64, 2)]


def test_own_entry_returns_the_exact_entry_of_this_gpu(options: Options) -> None:
    op = op_of(VARIANT)
    store(GOOD)
    store({"block": 512, "warps": 1}, HALF)
    store({"block": 128, "warps": 1}, CASE, "another_gpu")
    own = Task(op, CASE, VARIANT).own_entry()
    assert own is not None
    assert own.config == Task(op, CASE, VARIANT).config_of_call() == Small(64, 2)
    there = cache.Chooser.of(op, VARIANT).own(CASE, "another_gpu")
    assert there is not None
    assert there.config == Small(128, 1)
    assert Task(op, CASE, VARIANT, "hot").own_entry() is None  # so `tune --policy hot` searches it
    assert Task(op, CASE, VARIANT, "hot").config_of_call() == Small(64, 2)
    assert Task(op, CASE, Variant("eager", nothing)).config_of_call() is None


def test_own_entry_is_none_for_a_config_of_another_free_option_that_calls_run(options: Options) -> None:
    op = replace(op_of(VARIANT), options={"group": (64, 32)}, free_options=("group",), unseen_options=())
    wide, narrow = (replace(CASE, options=(("group", group),)) for group in (64, 32))
    store(GOOD, wide)
    assert Task(op, narrow, VARIANT).config_of_call() == Small(64, 2)
    assert Task(op, narrow, VARIANT).own_entry() is None  # so `tune` searches it
    assert Task(replace(op, free_options=()), narrow, VARIANT).config_of_call() == Small(256, 4)
    store({"block": 128, "warps": 1}, narrow)
    assert Task(op, narrow, VARIANT).config_of_call() == Small(128, 1)
