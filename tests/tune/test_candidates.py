"""Config classes of variants, with postponed and unknown annotations, and defaults that no search can begin with."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_tuner import CASE, SMALL, Small, op_of

from kerneltune.spec import Case, Variant
from kerneltune.task import Task
from kerneltune.tune.candidates import checked_space


def postponed(annotation: str) -> Variant:
    """Return a variant whose config class is of a module with `from __future__ import annotations`."""
    code = "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass(frozen=True)\nclass Knobs:\n"
    module: dict[str, Any] = {"__name__": __name__}
    exec(f"{code}    block: {annotation}\n", module)
    knobs = module["Knobs"]
    return Variant("optimized", dict, knobs, lambda _case: {"block": (64, 128)}, default=lambda _case: knobs(64))


def test_config_class_with_postponed_annotations_is_read() -> None:
    variant, case = postponed("int"), Case("c", (("M", 8),), "bfloat16")
    assert variant.valid_config(case, {"block": 128}).block == 128
    assert [config.block for config in variant.configs(case)] == [64, 128]
    with pytest.raises(ValueError, match="config of optimized: block: 'x': expected int"):
        variant.config_from({"block": "x"})


def test_config_class_with_an_unknown_type_raises_one_line() -> None:
    with pytest.raises(ValueError, match="config of optimized: Knobs: name 'Integer' is not defined"):
        postponed("Integer").config_from({"block": 64})


def failing(_case: Case) -> Small:
    raise KeyError("M")


@pytest.mark.parametrize(
    ("default", "error"),
    [
        (failing, "KeyError: 'M'"),
        (lambda _case: None, "default: None: expected a Small"),
        (lambda _case: Small(64, 1), "default: too small"),
    ],
)
def test_checked_space_with_an_invalid_default_raises_one_line(default: Callable[[Case], Any], error: str) -> None:
    variant = replace(SMALL, default=default, invalid=lambda _case, config: "too small" if config.block == 64 else None)
    with pytest.raises(ValueError) as caught:
        checked_space(Task(op_of(variant), CASE, variant))
    assert str(caught.value) == f"fake optimized: M=8 bfloat16 none: {error}"
