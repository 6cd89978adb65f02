"""Training steps of models: the workload's comparison, its table, and what is known of the models without building them."""

import importlib.util
from typing import Any

import pytest
import torch

from kerneltune.spec import Case
from kerneltune.workloads import models
from kerneltune.workloads.model_training import OPS, compare, inputs, traffic

CASE = Case("tiny", (("T", 40),), "bfloat16", "fp8", (("model", "tiny-experts"), ("compiled", False)))


def outcome(loss: float, gradient: list[float]) -> dict[str, Any]:
    return {"loss": torch.tensor(loss), "gradients": {"lm_head.weight": torch.tensor(gradient)}}


@pytest.mark.parametrize(
    ("got", "errors"),
    [
        (outcome(2.01, [1.0, 0.1]), []),
        (outcome(2.1, [1.0, 0.0]), ["loss: 2.1000, expected 2.0000 within 2%"]),
        (outcome(float("nan"), [1.0, 0.0]), ["loss: nan, expected 2.0000 within 2%"]),
        (outcome(2.0, [0.0, 1.0]), ["gradient of lm_head.weight: cosine 0.000, expected 0.9 or more"]),
    ],
    ids=["alike", "loss", "not a number", "gradient"],
)
def test_step_is_compared_by_loss_and_direction_of_gradients(got: dict[str, Any], errors: list[str]) -> None:
    assert compare(CASE, {}, got, outcome(2.0, [1.0, 0.0])) == errors


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.parametrize("name", models.SHAPES)
def test_number_of_parameters_is_about_that_of_the_model(name: str) -> None:
    model = models.build(name, "meta")
    assert models.num_parameters(name) == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.35)


def test_inputs_are_token_ids_of_the_model() -> None:
    ids = inputs(CASE, device="cpu")["ids"]
    assert ids.shape == (1, 40)
    assert int(ids.max()) < 64
    assert inputs(CASE, device="meta")["ids"].shape == (1, 40)
    assert traffic(CASE).total == 4 * models.num_parameters("tiny-experts")


def test_variants_without_transformers_are_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert {variant.unsupported(CASE) for variant in OPS[0].variants} == {"transformers is not installed"}
