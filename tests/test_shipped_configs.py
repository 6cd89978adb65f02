"""Shipped configs: the call of each config's case looks up exactly that config."""

from pathlib import Path

import pytest

from kerneltune import cache, ops
from kerneltune.cache import CacheEntry

SHIPPED = Path(__file__).parent.parent / "configs" / "nvidia_h200"
NAMES = sorted(path.stem for path in SHIPPED.glob("*.json"))
OPS = ops.load()


class LookedUpError(Exception):
    """Ends a call of a public function at its look-up."""


def entries_of(name: str) -> list[CacheEntry]:
    found = cache.load_strict(SHIPPED / f"{name}.json")
    assert found
    return found


def of_call(entry: CacheEntry) -> tuple[object, ...]:
    return entry.axes, entry.dtype, entry.quant, entry.options


@pytest.fixture
def first_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """End every call at its look-up, with an exception that holds the case."""

    def asked(self: cache.Chooser, axes: object, dtype: str, quant: str = "none", options: object = ()) -> None:
        raise LookedUpError(self.op, self.variant, axes, dtype, quant, options)

    monkeypatch.setattr(cache.Chooser, "__call__", asked)


@pytest.mark.usefixtures("first_look_up")
@pytest.mark.parametrize("name", NAMES)
def test_call_for_the_case_of_a_shipped_config_looks_up_this_config(name: str) -> None:
    op = OPS[name]
    for entry in entries_of(name):
        variant, case = op.variant(entry.variant), entry.as_case
        found = cache.Chooser.of(op, variant, entry.policy).find(op.called(case), "nvidia_h200")
        assert (found.source, found.config) == ("own", variant.config_from(entry.config)), case.label
        assert op.called(case) == case, f"no call looks up {case.label}"
        if variant.name == "optimized":  # the public function; other variants are given a config
            with pytest.raises(LookedUpError) as raised:
                variant.run(op.inputs(case, device="meta"), None)
            assert raised.value.args == (name, variant.name, *of_call(entry))
