"""Configs of a captured launch: the options of a launch that gives none."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from kerneltune.adopt.configs import DEFAULTS, launch_defaults


def test_launch_defaults_equal_options_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    in_use = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: "hip"))
    backend = SimpleNamespace(parse_options=lambda options: SimpleNamespace(num_stages=2, given=options))
    monkeypatch.setattr(importlib.import_module("triton.runtime.driver"), "driver", in_use)
    monkeypatch.setattr("triton.compiler.make_backend", {"hip": backend}.__getitem__)
    assert launch_defaults() == DEFAULTS | {"num_stages": 2}
    assert launch_defaults() != DEFAULTS


@pytest.mark.parametrize(
    "error", [RuntimeError("0 active drivers"), ModuleNotFoundError("no backend"), AttributeError("options")]
)
def test_launch_defaults_without_a_backend_are_those_of_nvidia(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    in_use = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: "none"))

    def make_backend(target: Any) -> None:
        assert target == "none"
        raise error

    monkeypatch.setattr(importlib.import_module("triton.runtime.driver"), "driver", in_use)
    monkeypatch.setattr("triton.compiler.make_backend", make_backend)
    assert launch_defaults() == DEFAULTS
