"""Training steps of models: the workload's comparison, its table, and facts of models without building them."""

import importlib.util
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kerneltune import stale
from kerneltune.checking.check import poisoned_memory
from kerneltune.plan import Options, Selection, load_plan
from kerneltune.spec import Case
from kerneltune.workloads import model_training, models
from kerneltune.workloads.model_training import OPS, compare, inputs, run, traffic

needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
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
def test_compare_of_steps_judges_loss_and_direction_of_gradients(got: dict[str, Any], errors: list[str]) -> None:
    assert compare(CASE, {}, got, outcome(2.0, [1.0, 0.0])) == errors


@needs_transformers
@pytest.mark.parametrize("name", models.SHAPES)
def test_num_parameters_is_within_35_percent_of_the_model(name: str) -> None:
    model = models.build(name, "meta")
    assert models.num_parameters(name) == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.35)


def test_inputs_are_token_ids_of_the_model() -> None:
    ids = inputs(CASE, device="cpu")["ids"]
    assert ids.shape == (1, 40)
    assert int(ids.max()) < 64
    assert inputs(CASE, device="meta")["ids"].shape == (1, 40)
    assert traffic(CASE).total == 4 * models.num_parameters("tiny-experts")


def test_variants_without_transformers_are_unsupported_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert {variant.unsupported(CASE) for variant in OPS[0].variants} == {"transformers is not installed"}


def test_variants_for_experts_are_unsupported_for_a_model_without_experts() -> None:
    case = Case("llama", (("T", 16384),), "bfloat16", "fp8", (("model", "llama-3-8b"), ("compiled", True)))
    reasons = {variant.name: variant.unsupported(case) for variant in OPS[0].variants}
    assert {name for name, reason in reasons.items() if reason == "llama-3-8b has no experts"} == {
        "tensorwise",
        "rowwise",
        "torchao",
    }


def test_steps_are_timed_under_policy_eager_unless_told_otherwise() -> None:
    ops = {"model_step": OPS[0]}
    for asked, policy in ((None, "eager"), ("cold", "cold"), ("hot", "hot")):
        plan = load_plan(ops, Selection("model_training"), Options(policy=asked))
        entry = plan.cases()[0]
        assert {task.policy for task in plan.tasks(entry.op, entry.case)} == {policy}
        assert plan.case_key(entry).policy == policy


def test_stale_steps_without_records_are_estimated_at_minutes_each(tmp_path: Path) -> None:
    (tmp_path / "nvidia_h100").mkdir()
    (tmp_path / "nvidia_h100" / "other.jsonl").touch()
    plans = stale.plans_of({"model_step": OPS[0]}, Selection("model_training"), Options(results=tmp_path))
    (family,) = stale.find(plans, "nvidia_h100").families
    assert len(family.stale) == 8
    assert family.seconds_a_case > 60


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of graphs that torch.compile makes of layers from now on, and let it run them as they are."""
    torch.compiler.reset()
    captured: list[Any] = []
    monkeypatch.setattr(
        models, "compile_layers", partial(models.compile_layers, backend=lambda graph, _: captured.append(graph) or graph.forward)
    )
    return captured


def with_epsilon(epsilon: float, model: nn.Module) -> None:
    """Change a constant of the first layer, so that it has a graph of its own."""
    model.get_submodule("model.layers.0.input_layernorm").variance_epsilon = epsilon  # type: ignore[assignment]


@needs_transformers
def test_variants_compile_once_each_for_all_inputs_under_poisoned_memory(graphs: list[Any]) -> None:
    case = Case("tiny", (("T", 40),), "bfloat16", "fp8", (("model", "tiny-experts"), ("compiled", True)))
    runs = [partial(run, partial(with_epsilon, epsilon), str(epsilon)) for epsilon in (1e-5, 1e-3)]
    with poisoned_memory():
        for step in runs:
            step(inputs(case, device="cpu"), None)
    assert len(graphs) == 2
    losses = [float(step(inputs(case, device="cpu", seed=1), None)["loss"]) for step in (*runs, *runs)]
    assert len(graphs) == 2
    assert losses[:2] == losses[2:]
    assert losses[0] != losses[1]


@needs_transformers
def test_variant_that_torch_would_run_eagerly_fails(graphs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("tiny", (("T", 40),), "bfloat16", "fp8", (("model", "tiny-experts"), ("compiled", True)))
    monkeypatch.setattr(model_training, "MOST_GRAPHS", 1)
    run(partial(with_epsilon, 1e-2), "first", inputs(case, device="cpu"), None)
    with pytest.raises(Exception, match="fail_on_recompile_limit_hit"):
        run(partial(with_epsilon, 2e-2), "second", inputs(case, device="cpu"), None)


@needs_transformers
def test_models_of_a_case_are_freed_by_the_next_case(graphs: list[Any]) -> None:
    alive: list[weakref.ref[nn.Module]] = []
    for is_compiled in (True, False):
        case = Case("tiny", (("T", 40),), "bfloat16", "fp8", (("model", "tiny-experts"), ("compiled", is_compiled)))
        graphs.clear()
        run(lambda model: alive.append(weakref.ref(model)), "seen", inputs(case, device="cpu"), None)
    assert [model() is None for model in alive] == [True, False]


def test_cases_of_the_family_fit_an_80_gb_gpu() -> None:
    plan = load_plan({op.name: op for op in OPS}, Selection("model_training"), Options())
    assert len(plan.sweep.bench) == 8
    needed = [op.memory_factor * op.traffic(entry.case).total for entry in plan.sweep.bench for op in OPS]
    assert max(needed) < 80e9
