"""Whole models of `transformers` in fp8: graphs, checkpoints, bytes, copies, frozen weights, replicas, recomputation."""

import copy
import pickle
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from kerneltune.nn import (
    DelayedScaling,
    convert_to_fp8_training,
    fp8_linear,
    revert_from_fp8_training,
    set_first_microbatch,
    update_scales,
)
from kerneltune.workloads import models

transformers = pytest.importorskip("transformers")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IDS = torch.arange(8, device=DEVICE).view(1, 8)
RECIPES = ("tensorwise", "rowwise", "delayed")
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1,
    "max_position_embeddings": 32, "use_cache": False,
}  # fmt: skip
"""A layer with 4 dense weights and 2 weights of 2 experts."""


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_linear, "LEAST_SIZE", 0)


def build(device: str = DEVICE, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_moe", **SIZES | sizes)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()


def converted(recipe: str, device: str = DEVICE, **sizes: Any) -> Any:
    model = build(device, **sizes)
    assert len(convert_to_fp8_training(model, recipe, dense=True)) == 5
    return model


Step = tuple[float, dict[str, torch.Tensor]]


def step(model: nn.Module) -> Step:
    """Return the loss of a step, and the gradients by the names of the parameters."""
    loss = models.step(model, IDS)
    return float(loss), {name.removeprefix("module."): p.grad for name, p in model.named_parameters() if p.grad is not None}


@cache
def trained(recipe: str) -> tuple[Any, Step]:
    """Return a converted model after its first step, which no test changes, with the loss and the gradients of the step."""
    model = converted(recipe)
    return model, step(model)


def assert_same(got: Step, want: Step) -> None:
    assert got[0] == want[0]
    assert got[1].keys() == want[1].keys()
    assert [name for name, gradient in want[1].items() if not torch.equal(got[1][name], gradient)] == []


def num_graphs(model: Any) -> int:
    torch.compiler.reset()
    graphs: list[Any] = []
    models.compile_layers(model, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for _ in range(2):
        step(model)
    return len(graphs)


def test_converted_model_compiles_into_as_many_graphs_as_in_bf16() -> None:
    assert [num_graphs(model) for model in (build(), converted("tensorwise"))] == [1, 1]


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpoints_of_plain_and_converted_models_load_into_each_other(recipe: str) -> None:
    model, plain = converted(recipe), build()
    model.load_state_dict(plain.state_dict(), strict=True)
    converted(recipe).load_state_dict(model.state_dict(), strict=True)
    if recipe == "delayed":  # whose scales are the only keys that a recipe adds
        added = model.state_dict().keys() - plain.state_dict().keys()
        assert {name.rpartition(".")[2] for name in added} == {"scales", "history", "_extra_state"}
        revert_from_fp8_training(model)
    plain.load_state_dict(model.state_dict(), strict=True)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_conversion_keeps_four_bytes_for_an_expert_weight_and_the_scales(recipe: str) -> None:
    def nbytes(model: nn.Module) -> int:
        return sum(t.untyped_storage().nbytes() for t in {*model.parameters(), *model.buffers()})

    model, _ = trained(recipe)
    experts = [1] * 4 + [2, 2]  # of each weight
    scales = sum(17 * (2 + E) for E in experts) if recipe == "delayed" else 0
    assert nbytes(model) - nbytes(build()) == 4 * (sum(experts) + scales)


def test_model_converted_without_memory_trains_as_one_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = converted("delayed", "meta")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda t, **options: torch.full_like(t, 77, **options))  # as memory of any content
        model.to_empty(device=DEVICE)
    plain = build()
    model.load_state_dict(plain.state_dict(), strict=True)
    model.model.rotary_emb = plain.model.rotary_emb  # its buffers are no part of a checkpoint
    scalings = [module for module in model.modules() if isinstance(module, DelayedScaling)]
    assert len(scalings) == 6
    for scaling in scalings:
        assert not scaling.known
        assert torch.equal(scaling.scales, torch.ones_like(scaling.scales))
        assert not scaling.history.any()
    _, want = trained("delayed")
    assert_same(step(model), want)


def test_copy_of_a_converted_model_trains_alike_and_reverts() -> None:
    model, want = trained("delayed")
    other = copy.deepcopy(pickle.loads(pickle.dumps(model)))
    assert_same(step(other), want)
    assert len(revert_from_fp8_training(other)) == 5
    assert_same(step(other), step(build()))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_frozen_weights_have_no_gradient_and_change_no_other(recipe: str) -> None:
    (_, (loss, gradients)), model = trained(recipe), converted(recipe)
    frozen = {name for name in gradients if "experts.gate_up_proj" in name or "q_proj" in name or "o_proj" in name}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    assert_same(step(model), (loss, {name: gradient for name, gradient in gradients.items() if name not in frozen}))


@pytest.mark.parametrize(("recipe", "reentrant"), [("tensorwise", True), ("delayed", False)])
def test_recomputed_layers_give_the_bits_of_layers_that_keep_their_activations(recipe: str, reentrant: bool) -> None:
    model, (_, want) = converted(recipe), trained(recipe)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same(step(model), want)


@pytest.fixture
def one_process() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.skipif(DEVICE != "cpu", reason="a group of one process on the CPU")
def test_replicated_model_trains_alike_whether_converted_before_or_after(one_process: None) -> None:
    _, want = trained("delayed")
    before = DistributedDataParallel(converted("delayed"), find_unused_parameters=True)
    after = DistributedDataParallel(build(), find_unused_parameters=True)
    assert len(convert_to_fp8_training(after, "delayed", dense=True)) == 5
    for model in (before, after):
        assert set_first_microbatch(model, True) == 6
        for _ in range(2):  # the second forward pass begins with a broadcast of buffers, of which Gloo refuses fp8
            assert_same(step(model), want)
        with torch.no_grad():
            assert float(model(input_ids=IDS, labels=IDS).loss) == want[0]


def test_layers_with_a_bias_train_as_in_bf16() -> None:
    model, plain = converted("tensorwise", attention_bias=True), build(attention_bias=True)
    for name, parameter in plain.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    model.load_state_dict(plain.state_dict())
    (loss, got), (want_loss, want) = step(model), step(plain)
    assert loss == pytest.approx(want_loss, rel=0.01)
    biases = [name for name in want if name.endswith("bias")]
    assert biases
    for name in biases:
        assert nn.functional.cosine_similarity(got[name].float(), want[name].float(), 0) > 0.95


def test_convert_keeps_a_weight_tied_to_the_embedding() -> None:
    model = converted("tensorwise", tie_word_embeddings=True)
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_convert_skips_other_kinds_of_layers_and_takes_no_neighbour_for_a_router() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    class Causal(nn.Conv1d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[..., :1]

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = nn.ParameterList([nn.Parameter(torch.ones(32, 32))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.held[0]

    others = {
        "pairs": nn.Bilinear(32, 32, 32),
        "conv": Causal(32, 32, 16),
        "script": torch.jit.trace(nn.Linear(32, 32), torch.ones(1, 32)),
        "gpt2": transformers.pytorch_utils.Conv1D(32, 32),
        "held": Held(),
    }
    named = {"own": Own(32, 32), "normed": nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), "odd": nn.Linear(32, 40)}
    silent = {"norm": nn.LayerNorm(32), "embedding": nn.Embedding(8, 32)}
    model = nn.ModuleDict({**others, **named, **silent, "plain": nn.Linear(32, 32)})
    conversion = convert_to_fp8_training(model, dense=True)
    assert conversion == ["plain"]
    assert conversion.skipped == {
        **{name: f"a {type(module).__name__}: of dense layers, nn.Linear alone runs in fp8" for name, module in others.items()},
        "own": "a Own, which may have a forward of its own",
        "normed": "a ParametrizedLinear, which may have a forward of its own",
        "odd": "weight must be (N, K), N and K multiples of 16, got (40, 32)",
    }
    with pytest.raises(ValueError, match=r"no linear layers.* gpt2: a Conv1D: of dense layers, nn.Linear alone runs in fp8"):
        convert_to_fp8_training(nn.ModuleDict({"gpt2": others["gpt2"]}), dense=True)


def test_convert_skips_a_router_that_is_no_linear_layer() -> None:
    conversion = convert_to_fp8_training(build(), dense=True)
    assert conversion.skipped["model.layers.0.mlp.gate"] == "a router, which chooses among 2 experts"


def test_model_converted_under_inference_mode_trains_later() -> None:
    layer, x = nn.Linear(32, 32, device=DEVICE), torch.randn(16, 32, device=DEVICE)
    with torch.inference_mode():
        convert_to_fp8_training(layer, "delayed", dense=True)
        want = layer(x)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, want)
    assert update_scales(layer) == 1


def test_convert_with_a_filter_that_is_no_function_raises() -> None:
    with pytest.raises(ValueError, match=r"^filter_fn: 3: expected a function of a module and its name, or None$"):
        convert_to_fp8_training(nn.Linear(32, 32), dense=True, filter_fn=3)
