"""Damaged cache files: whatever an entry holds, look-ups return a valid config, and warn."""

import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kerneltune import cache, ops
from kerneltune.cache import Chooser
from kerneltune.files import data_root
from kerneltune.spec import Case

pytestmark = pytest.mark.usefixtures("forgotten_configs")

GPU = "nvidia_h200"
NAMES = ("rmsnorm_fwd", "rmsnorm_bwd", "fp8_rowwise_2d", "fp8_tensorwise_3d", "fp8_grouped_gemm")
NASTY = (0, -16, 10**400, float("nan"), float("inf"), True, None, "8", [1], {"a": 1}, 3)
TEXTS = ("9" * 5000, "[" * 3000 + "]" * 3000, '"\\ud800"')
"""JSON that Python's own reader refuses or reads as something that no file can hold."""


def mutants(entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the entry with a changed value, and without a field."""
    for field, value in entry.items():
        for changed in NASTY:
            if isinstance(value, dict):
                for name in value:
                    mutant = copy.deepcopy(entry)
                    mutant[field][name] = changed
                    yield mutant
            else:
                yield {**entry, field: changed}
        yield {name: other for name, other in entry.items() if name != field}


def answers(op_name: str, root: Path, cases: list[Case]) -> None:
    """Look cases up: no look-up raises, and each config is valid."""
    op = ops.load()[op_name]
    variant = op.variant("optimized")
    cache.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            config = Chooser.of(op, variant, "cold", root).find(case, GPU).config
            assert type(config) is variant.config
            assert variant.invalid(case, config) is None


@pytest.mark.parametrize("name", NAMES)
def test_look_up_with_any_damaged_value_of_an_entry_returns_a_valid_config(name: str, tmp_path: Path) -> None:
    op = ops.load()[name]
    stored = json.loads(cache.path_of(name, GPU, data_root("configs")).read_text())
    good = [entry for entry in stored["entries"] if entry["variant"] == "optimized"][:2]
    case = Case("", tuple(good[0]["axes"].items()), good[0]["dtype"], good[0]["quant"], tuple(good[0]["options"].items()))
    near = Case("", tuple((a, size + 16 * (a in op.free_axes)) for a, size in case.axes), case.dtype, case.quant, case.options)
    path = cache.path_of(name, GPU, tmp_path)
    path.parent.mkdir(parents=True)
    for mutant in mutants(good[0]):
        path.write_text(json.dumps({**stored, "entries": [mutant, good[1]]}))
        answers(name, tmp_path, [case, near])
    for text in TEXTS:
        path.write_text(json.dumps({**stored, "entries": [{**good[0], "config": "TEXT"}, good[1]]}).replace('"TEXT"', text))
        answers(name, tmp_path, [case, near])


def test_entry_with_an_impossible_number_of_elements_is_skipped() -> None:
    op = ops.load()["rmsnorm_fwd"]
    chooser = Chooser.of(op, op.variant("optimized"))
    config = {
        name: values[0] for name, values in op.variant("optimized").space(Case("", (("M", 8), ("N", 64)), "bfloat16")).items()
    }
    values = {"variant": "optimized", "case": "a", "dtype": "bfloat16", "quant": "none", "options": {}, "policy": "cold"}
    entry = cache.entry_from("rmsnorm_fwd", {**values, "axes": {"M": 1 << 50, "N": 64}, "config": config, "evidence": {}})
    assert chooser.why_rejected(entry) == f"axes: a size of more than {1 << 48}"
