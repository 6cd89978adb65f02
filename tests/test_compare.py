"""Records of a measured case, with a GPU that is only pretended."""

from typing import Any

import numpy as np
import pytest
import torch

from kerneltune import device, ops
from kerneltune.measuring import compare
from kerneltune.spec import Case, Variant

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")

OP = ops.load()["rmsnorm_fwd"]
CASE = Case("c", (("M", 64), ("N", 64)), "bfloat16", "none", (("zero_centered", False),))
PAIRS = [(OP.variant(name), OP.variant(name).default_config(CASE)) for name in ("baseline", "pr593", "optimized")]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times by variant, without noise but for the self-comparison; `pr593` is wrong."""

    class Checker:
        def __init__(self, *_: object) -> None: ...

        def errors(self, variant: Variant, _config: object) -> list[str]:
            return ["y differs"] if variant.name == "pr593" else []

    us = {"baseline": 20.0, compare.SELF: 20.2, "optimized": 10.0}
    rounds = np.linspace(0.99, 1.01, 15)
    h200 = device.Device("NVIDIA H200", "sm_90", 132, 60_000_000, "580")
    monkeypatch.setattr(device, "current", lambda: h200)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(compare, "Checker", Checker)
    monkeypatch.setattr(compare, "memory_shortage", lambda *_: None)
    monkeypatch.setattr(compare, "input_sets", lambda *_: [{}])
    monkeypatch.setattr(compare, "contender", lambda *_: None)
    monkeypatch.setattr(compare, "time_contenders", lambda cs: {name: us[name] * rounds for name in cs})


def test_a_record_keeps_the_rounds_of_its_process(gpu: None) -> None:
    baseline, wrong, optimized = compare.compare("f", OP, CASE, PAIRS, "cold", None)
    assert (wrong.status, wrong.reason, wrong.samples_us) == ("failed", "y differs", None)
    assert [row.time_us for row in (baseline, optimized)] == [20.0, 10.0]
    assert optimized.samples_us is not None and len(optimized.samples_us) == 1
    assert optimized.samples_us[0] == pytest.approx(list(10.0 * np.linspace(0.99, 1.01, 15)), rel=1e-5)
    assert optimized.n == 15 and optimized.family == "f"
    assert baseline.aa_floor == optimized.aa_floor == pytest.approx(1 - 1 / 1.01, rel=1e-4)


def test_nothing_is_timed_where_nothing_is_right(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("timed")

    monkeypatch.setattr(compare, "time_contenders", never)
    (wrong,) = compare.compare("f", OP, CASE, PAIRS[1:2], "cold", None)
    assert wrong.status == "failed"
