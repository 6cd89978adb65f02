"""Convert every kind of expert module that the library's decorator marks, found in its source; every class with `-m models`."""

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from asserting import every
from torch import nn

from kerneltune.nn import convert_to_fp8_training, revert_from_fp8_training

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, TOKENS = 4, 11
MARKED = re.compile(r"^@use_experts_implementation(\(.*\))?\n(?:@.*\n)*class (\w+)\(.*\n((?:[ \t].*\n|\n)*)", re.MULTILINE)
METHOD = re.compile(r"^    def (?!__init__)(?:.*\n)(?:(?: {5,}.*)?\n)*", re.MULTILINE)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "expert_class" in metafunc.fixturenames:
        most = None if "models" in metafunc.config.option.markexpr else 1
        metafunc.parametrize("expert_class", [name for names in kinds_of_classes().values() for name in names[:most]])


def kinds_of_classes() -> dict[object, list[str]]:
    """Return the names of the marked classes, grouped by equal options and methods."""
    spec = importlib.util.find_spec("transformers")
    kinds: dict[object, list[str]] = {}
    for path in sorted(Path(str(spec and spec.origin)).parent.glob("models/*/modeling_*.py")):
        for options, name, body in MARKED.findall(path.read_text(encoding="utf-8")):
            methods = re.sub(r'#.*|""".*?"""|\s', "", "".join(METHOD.findall(body)), flags=re.DOTALL | re.MULTILINE)
            module = ".".join(("transformers", *path.parts[-3:-1], path.stem))
            kinds.setdefault((options, methods), []).append(f"{module}:{name}")
    return kinds


class TinyConfig:
    """A config of a small model: whatever a class asks for."""

    _experts_implementation = "eager"

    def __init__(self, limit: float) -> None:
        self.limit = limit

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        values = {
            "act": "silu",
            "limit": self.limit,
            "alpha": 1.5,
            "beta": 1.5,
            "intermediate": 16,
            "ffn": 16,
            "hidden": 32,
            "latent": None,
        }
        return next((value for part, value in values.items() if part in name), EXPERTS)


@pytest.mark.parametrize("limit", [1.5, 1000.0])
def test_experts_of_a_class_multiply_in_fp8_close_to_bf16_and_revert(expert_class: str, limit: float) -> None:
    """Gradients are compared where no value reaches the limit: there, a step of fp8 decides between a gradient and none."""
    module_name, name = expert_class.split(":")
    experts: Any = getattr(importlib.import_module(module_name), name)(TinyConfig(limit))
    for p in experts.parameters():
        nn.init.normal_(p, std=0.3)
    experts.to(DEVICE, torch.bfloat16)
    x = torch.randn(TOKENS, 32, device=DEVICE).bfloat16().requires_grad_()
    chosen = torch.rand(TOKENS, EXPERTS, device=DEVICE).topk(2).indices
    weights = torch.rand(TOKENS, 2, device=DEVICE).bfloat16().requires_grad_()
    dy = torch.randn(TOKENS, 32, device=DEVICE).bfloat16()

    def step() -> list[torch.Tensor]:
        y = experts(x, chosen, weights)
        return [y, *torch.autograd.grad(y, (x, weights, *experts.parameters()), dy)]

    want = step()
    assert convert_to_fp8_training(experts) == [""]
    got = step()
    assert not torch.equal(got[0], want[0])
    for a, b in zip(got[: None if limit > 100 else 1], want, strict=False):
        assert (a.float() - b.float()).norm() < 0.25 * b.float().norm()  # at most 0.174 with 24 seeds of four classes
    revert_from_fp8_training(experts)
    assert every(torch.equal(*pair) for pair in zip(step(), want, strict=True))
