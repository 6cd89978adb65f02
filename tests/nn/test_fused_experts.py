"""Expert modules of `transformers`, of torchtitan's shape and of Llama 4 in fp8: results, compilation, copies, the way back."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from asserting import every
from torch import distributed, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from kerneltune.kernel_lib.groups import aligned_size
from kerneltune.nn import (
    Fp8Linear,
    convert_to_fp8_training,
    fp8_grouped_mm,
    revert_from_fp8_training,
    set_first_microbatch,
    update_scales,
)
from kerneltune.nn.converted import UnknownExperts

transformers = pytest.importorskip("transformers")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E, HIDDEN, INNER, TOKENS, TOP_K = 3, 32, 16, 11, 2


def experts(implementation: str = "grouped_mm", kind: str = "deepseek") -> Any:
    """Return an expert module with random bf16 weights; `gpt-oss` has biases, interleaved gates and (E, K, N) weights."""
    if kind == "gpt-oss":
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts as Experts

        config: Any = transformers.GptOssConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=E)
    else:
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts as Experts

        config = transformers.DeepseekV3Config(hidden_size=HIDDEN, moe_intermediate_size=INNER, n_routed_experts=E)
    config._experts_implementation = implementation
    module = Experts(config)
    for p in module.parameters():
        nn.init.normal_(p, std=0.3)
    return module.to(DEVICE, torch.bfloat16)


def batch(tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens (T, H), the experts that a router chose (T, k), and its weights (T, k)."""
    x = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16().requires_grad_()
    rows = [torch.randperm(E, device=DEVICE)[:TOP_K] for _ in range(tokens)] or [torch.zeros(TOP_K, device=DEVICE)]
    chosen = torch.stack(rows).long()
    return x, chosen[:tokens], torch.rand(tokens, TOP_K, device=DEVICE).requires_grad_()


def gradients(module: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Return the result and the gradients of x, of the router's weights and of all parameters."""
    y = module(x, chosen, weights)
    torch.manual_seed(0)
    return [y, *torch.autograd.grad(y, (x, weights, *module.parameters()), torch.randn_like(y))]


def assert_close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert (a.float() - b.float()).norm() < 0.12 * b.float().norm()


@pytest.mark.parametrize("kind", ["deepseek", "gpt-oss"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fused_experts_with_groups_as_routed_match_bf16(kind: str, recipe: str) -> None:
    module, arguments = experts(kind=kind), batch()
    want = gradients(module, *arguments)
    assert convert_to_fp8_training(module, recipe) == [""]
    got = gradients(module, *arguments)
    assert_close(got, want)
    assert not torch.equal(got[0], want[0])


@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_fused_experts_of_every_implementation_run_in_fp8(implementation: str) -> None:
    module, other, arguments = experts(), experts(implementation), batch()
    other.load_state_dict(module.state_dict())
    for m in (module, other):
        convert_to_fp8_training(m)
    assert torch.equal(module(*arguments), other(*arguments))


@pytest.mark.parametrize("kind", ["gpt-oss", "torchtitan", "llama4"])
def test_expert_layers_compile_without_a_graph_break_once_for_all_steps(kind: str) -> None:
    torch.compiler.reset()
    module, arguments = expert_layer(kind)
    convert_to_fp8_training(module)
    y = module(*arguments)
    dy = torch.randn_like(y)
    want = [y, *torch.autograd.grad(y, tuple(module.parameters()), dy)]
    graphs: list[Any] = []

    def compile_graph(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs) if kind == "gpt-oss" else graph.forward  # ahead-of-time autograd once: it takes most time

    compiled = torch.compile(module, backend=compile_graph, fullgraph=True)
    for _ in range(2):
        y = compiled(*arguments)
        got = [y, *torch.autograd.grad(y, tuple(module.parameters()), dy)]
        assert every(torch.equal(*pair) for pair in zip(got, want, strict=True))
    assert len(graphs) == 1


def expert_layer(kind: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Return an expert module with weights, and arguments of its forward pass."""
    if kind == "torchtitan":
        counts = torch.tensor([5, 0, 19], device=DEVICE)
        return GroupedExperts(), (torch.randn(24, HIDDEN, device=DEVICE).bfloat16(), counts)
    if kind == "llama4":
        return llama4_experts(), (torch.randn(E * 3, HIDDEN, device=DEVICE).bfloat16(),)
    return experts(kind=kind), batch()


def test_fused_experts_keep_operands_of_the_backward_pass_once() -> None:
    module, arguments = experts(), batch()
    convert_to_fp8_training(module)
    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t.nbytes) and t, lambda t: t):
        module(*arguments)
    rows, columns = TOKENS * TOP_K, aligned_size(TOKENS * TOP_K, E)
    weights = E * 3 * INNER * HIDDEN  # gate, up and down in fp8, transposed
    operands = columns * (HIDDEN + INNER)  # tokens and gated rows in fp8, transposed
    wide = 2 * rows * (2 * INNER + HIDDEN)  # bf16: the rows that the gate reads, and the rows that the router weighs
    small = 4 * (rows + E + rows) + 4 * (2 + 2 * E)  # places, offsets, router weights, and scales
    assert sum(kept.values()) == weights + operands + wide + small


def test_fused_experts_ignore_choices_of_other_ranks() -> None:
    module, (x, chosen, weights) = experts(), batch()
    convert_to_fp8_training(module)
    elsewhere = chosen.clone()
    elsewhere[:, 1] = E
    alone = weights.detach() * torch.tensor([1.0, 0.0], device=DEVICE)
    assert torch.equal(module(x, elsewhere, alone), module(x, chosen, alone))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_fused_experts_without_tokens_have_gradients_of_zero(recipe: str) -> None:
    module = experts()
    convert_to_fp8_training(module, recipe)
    y, *grads = gradients(module, *batch(0))
    assert y.shape == (0, HIDDEN)
    assert [g.shape for g in grads[2:]] == [p.shape for p in module.parameters()]
    assert not any(g.any() for g in grads)


def test_convert_refuses_a_forward_set_on_an_object_and_skips_that_of_a_subclass() -> None:
    module, arguments = experts(), batch()
    module.forward = module.forward  # as hooks of accelerate wrap it
    with pytest.raises(
        ValueError, match=r"skipped: .*Experts: a forward set on the object, as hooks of accelerate are: convert before"
    ):
        convert_to_fp8_training(module)

    class Doubled(type(module)):
        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(*args)

    doubled = experts()
    doubled.__class__ = Doubled
    want = doubled(*arguments)
    with pytest.raises(ValueError, match=r"skipped: Doubled: the code of Doubled.forward makes no grouped"):
        convert_to_fp8_training(doubled)
    assert torch.equal(doubled(*arguments), want)
    late = experts()
    convert_to_fp8_training(late)
    late.forward = late.forward
    with pytest.raises(ValueError, match="the model has a forward set on the object since it was converted"):
        revert_from_fp8_training(late)


def test_converted_experts_use_a_gate_of_the_object_and_parametrized_weights() -> None:
    module, arguments = experts(), batch()
    module._apply_gate = lambda rows: rows[:, :INNER]
    torch.nn.utils.parametrize.register_parametrization(module, "gate_up_proj", nn.Softsign())
    want = module(*arguments)
    convert_to_fp8_training(module)
    assert_close([module(*arguments)], [want])
    revert_from_fp8_training(module)
    assert torch.equal(module(*arguments), want)


def test_weights_kept_by_an_evaluation_serve_training() -> None:
    module, arguments = experts(), batch()
    convert_to_fp8_training(module)
    set_first_microbatch(module, True)
    with torch.inference_mode():
        want = module(*arguments)
    assert torch.equal(gradients(module, *arguments)[0], want)


def test_converted_experts_survive_copies_and_pickles_and_revert() -> None:
    module, arguments = experts(), batch()
    kind, before = type(module), module(*arguments)
    convert_to_fp8_training(module, "rowwise")
    want = module(*arguments)
    assert "recipe=Recipe(scaling='rowwise'" in repr(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*arguments), want)
        assert type(other) is type(module)
    assert revert_from_fp8_training(module) == [""]
    assert type(module) is kind
    assert torch.equal(module(*arguments), before)
    assert revert_from_fp8_training(module) == []


def test_fused_experts_under_autocast_accept_fp32_weights() -> None:
    module, (x, chosen, weights) = experts(), batch()
    convert_to_fp8_training(module)
    want = module(x, chosen, weights)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = module.float()(x.float(), chosen, weights)
    assert got.dtype == torch.float32
    assert torch.equal(got.bfloat16(), want)


def test_delayed_experts_use_scales_of_the_last_step() -> None:
    module, arguments = experts(), batch()
    want = gradients(module, *arguments)
    convert_to_fp8_training(module, "delayed")
    for _ in range(2):
        assert_close(gradients(module, *arguments), want)
        assert update_scales(module) == 2


def test_plain_checkpoint_loads_strictly_after_a_conversion_to_any_recipe() -> None:
    plain = experts()
    for recipe in ("tensorwise", "rowwise", "delayed"):
        module = experts()
        convert_to_fp8_training(module, recipe)
        module.load_state_dict(plain.state_dict())
        assert torch.equal(module.down_proj, plain.down_proj)
        if recipe != "delayed":
            assert list(module.state_dict()) == list(plain.state_dict())
    assert gradients(module, *batch())
    update_scales(module)
    other = experts()
    convert_to_fp8_training(other, "delayed")
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.fp8.down_proj_scaling.scales, module.fp8.down_proj_scaling.scales)
    state = module.state_dict()
    del state["fp8.down_proj_scaling.scales"]
    with pytest.raises(RuntimeError, match=r"Missing key.*fp8.down_proj_scaling.scales"):
        other.load_state_dict(state)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_kept_weights_serve_later_microbatches_until_the_next_first_one(recipe: str) -> None:
    module, arguments = experts(), batch()
    with pytest.raises(ValueError, match="DeepseekV3Experts has no converted modules"):
        set_first_microbatch(module, True)
    convert_to_fp8_training(module, recipe)
    want = gradients(module, *arguments)
    for is_first in (True, False):
        assert set_first_microbatch(module, is_first) == 2
        assert every(torch.equal(*pair) for pair in zip(gradients(module, *arguments), want, strict=True))
    with torch.no_grad():
        module.down_proj.mul_(4)
    assert torch.equal(module(*arguments), want[0])
    set_first_microbatch(module, True)
    assert torch.equal(module(*arguments), 4 * want[0])
    set_first_microbatch(module, None)
    assert module.fp8.down_proj_kept.q is None
    assert torch.equal(module(*arguments), 4 * want[0])


class GroupedExperts(nn.Module):
    """Experts as torchtitan has them."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("w1", (E, INNER, HIDDEN)), ("w2", (E, HIDDEN, INNER)), ("w3", (E, INNER, HIDDEN))):
            setattr(self, name, nn.Parameter(torch.randn(shape, device=DEVICE).bfloat16()))

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        offs = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        hidden = F.silu(torch._grouped_mm(x, self.w1.mT, offs)) * torch._grouped_mm(x, self.w3.mT, offs)
        return torch._grouped_mm(hidden, self.w2.mT, offs)


class LoopedExperts(GroupedExperts):
    """Experts of torchtitan where it has no grouped product."""

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        parts = torch.split(x, num_tokens_per_expert.tolist())
        by_expert = zip(parts, self.w1, self.w2, self.w3, strict=True)
        return torch.cat([(F.silu(rows @ w1.T) * (rows @ w3.T)) @ w2.T for rows, w1, w2, w3 in by_expert])


@pytest.mark.parametrize("kind", [GroupedExperts, LoopedExperts])
def test_experts_of_torchtitan_of_any_group_sizes_match_bf16(kind: type[GroupedExperts]) -> None:
    """The kind of experts is known by what their forward pass computes."""
    module, x = kind(), torch.randn(24, HIDDEN, device=DEVICE).bfloat16()
    counts = torch.tensor([5, 0, 19], device=DEVICE)
    want = module(x, counts)
    convert_to_fp8_training(module)
    assert not isinstance(module, UnknownExperts)
    assert_close([module(x, counts)], [want])


class CountingExperts(GroupedExperts):
    """Count the calls in a buffer, in place."""

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return by_experts(self, x, num_tokens_per_expert)


def test_conversion_changes_no_buffer_of_experts() -> None:
    module = CountingExperts()
    module.register_buffer("calls", torch.zeros(1, device=DEVICE))
    convert_to_fp8_training(module)
    assert module.calls.item() == 0


def by_experts(module: Any, x: torch.Tensor, counts: torch.Tensor, gate: str = "w1", up: str = "w3", act: Any = F.silu) -> Any:
    """Multiply as torchtitan's experts do, with another activation or order of the weights."""
    offs = counts.cumsum(0, dtype=torch.int32)
    hidden = act(torch._grouped_mm(x, getattr(module, gate).mT, offs)) * torch._grouped_mm(x, getattr(module, up).mT, offs)
    return torch._grouped_mm(hidden, module.w2.mT, offs)


class GeluExperts(GroupedExperts):
    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        return by_experts(self, x, num_tokens_per_expert, act=F.gelu)


class ClampedExperts(GroupedExperts):
    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        return by_experts(self, x, num_tokens_per_expert, act=lambda gate: F.silu(gate.clamp(max=7)))


class ReluExperts(GroupedExperts):
    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        return by_experts(self, x, num_tokens_per_expert, act=F.relu)


class ScaledExperts(GroupedExperts):
    route_scale = 2.5

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        return self.route_scale * by_experts(self, x, num_tokens_per_expert)


class SwappedExperts(GroupedExperts):
    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        return by_experts(self, x, num_tokens_per_expert, gate="w3", up="w1")


class FailingExperts(ScaledExperts):
    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        assert x.shape[-1] == HIDDEN, "silu of small inputs fails"
        return super().forward(x, num_tokens_per_expert)


@pytest.mark.parametrize("kind", [GeluExperts, ReluExperts, ClampedExperts, ScaledExperts, SwappedExperts, FailingExperts])
def test_grouped_experts_that_compute_something_else_keep_their_forward(kind: type[GroupedExperts]) -> None:
    module, x = kind(), torch.randn(24, HIDDEN, device=DEVICE).bfloat16()
    counts = torch.tensor([5, 0, 19], device=DEVICE)
    want = module(x, counts)
    convert_to_fp8_training(module)
    assert isinstance(module, UnknownExperts)
    assert_close([module(x, counts)], [want])


class Batched(nn.Module):
    """Experts that multiply batches, with a weight in a list beside another whose name is alike."""

    def __init__(self) -> None:
        super().__init__()
        self.a_0 = nn.Parameter(torch.randn(E, HIDDEN, HIDDEN, device=DEVICE).bfloat16())
        self.a = nn.ParameterList([nn.Parameter(torch.randn(E, HIDDEN, HIDDEN, device=DEVICE).bfloat16())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.bmm(x, self.a_0), self.a[0])


def test_experts_whose_weights_would_share_a_name_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match=r"two expert weights that would both be called a_0: rename one"):
        convert_to_fp8_training(Batched())


def test_product_into_an_own_output_stays_in_bf16() -> None:
    class Into(Batched):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x)
            torch.bmm(x, self.a_0.detach(), out=y)
            return torch.bmm(y, self.a_0)

    module, x = Into(), torch.randn(E, 16, HIDDEN, device=DEVICE).bfloat16()
    del module.a
    want = module(x)
    convert_to_fp8_training(module)
    assert_close([module(x)], [want])


def test_conversion_passes_a_forward_whose_closure_has_no_value_yet() -> None:
    module = Batched()
    del module.a

    def with_closure() -> Any:
        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x, self.a_0) if x.numel() else later(x)

        if len(str(module)) < 0:
            later = abs
        return forward

    kind = type("Closed", (Batched,), {"forward": with_closure()})
    module.__class__ = kind
    assert convert_to_fp8_training(module)


def llama4_experts() -> nn.Module:
    """Return experts of Llama 4 with random bf16 weights, which multiply batches of tokens."""
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    module = Llama4TextExperts(transformers.Llama4TextConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=E))
    for p in module.parameters():
        nn.init.normal_(p)
    return module.to(DEVICE, torch.bfloat16)


def test_llama4_experts_multiply_batches_in_fp8() -> None:
    module, x = llama4_experts(), torch.randn(E * 3, HIDDEN, device=DEVICE).bfloat16()
    convert_to_fp8_training(module)
    got = module(x)
    offs = torch.arange(3, 3 * E + 1, 3, dtype=torch.int32, device=DEVICE)
    gate, up = fp8_grouped_mm(x, module.gate_up_proj.detach(), offs).view(E, 3, -1).chunk(2, -1)
    hidden = (up * module.act_fn(gate)).view(E * 3, -1)
    assert torch.equal(got, fp8_grouped_mm(hidden, module.down_proj.detach(), offs))


def test_convert_on_meta_works_with_weights_loaded_later() -> None:
    source, arguments = experts(), batch()
    module = copy.deepcopy(source).to("meta")
    convert_to_fp8_training(module)
    assert module(*(t.to("meta") for t in arguments)).shape == (TOKENS, HIDDEN)
    module.to_empty(device=DEVICE).load_state_dict(source.state_dict())
    convert_to_fp8_training(source)
    assert torch.equal(module(*arguments), source(*arguments))


def test_convert_of_weights_of_wrong_sizes_names_module_and_sizes() -> None:
    module = nn.ModuleDict({"mlp": experts()})
    module["mlp"].down_proj = nn.Parameter(torch.randn(E, HIDDEN, INNER + 8, device=DEVICE).bfloat16())
    with pytest.raises(ValueError, match=r"mlp: down_proj must be \(E, N, K\), N and K multiples of 16, got \(3, 32, 24\)"):
        convert_to_fp8_training(module)
    module["dense"] = nn.Linear(1024, 1024)
    conversion = convert_to_fp8_training(module, dense=True)  # beside modules that can run in fp8, they stay by name
    assert conversion == ["dense"]
    assert "got (3, 32, 24)" in conversion.skipped["mlp"]
    assert not hasattr(module["mlp"], "fp8")
    del module["dense"]
    module["mlp"].down_proj = nn.Parameter(torch.randn(E, HIDDEN, INNER, device="meta"))
    if DEVICE != "meta":
        with pytest.raises(ValueError, match="mlp: weights must be on one device, got"):
            convert_to_fp8_training(module)


def test_converted_product_that_cannot_run_raises_with_its_module() -> None:
    module = nn.ModuleDict({"mlp": GroupedExperts()})
    convert_to_fp8_training(module)
    counts = torch.tensor([5, 0, 19], device=DEVICE)
    with pytest.raises(ValueError, match=r"mlp.w1: fp8_grouped_mm takes A"):
        module["mlp"](torch.randn(24, HIDDEN + 16, device=DEVICE), counts)


@pytest.mark.skipif(DEVICE != "cpu", reason="a group of one process on the CPU")
def test_sharded_experts_and_dense_layers_match_those_of_one_process() -> None:
    model = nn.ModuleDict({"experts": experts(), "dense": nn.Linear(HIDDEN, HIDDEN, dtype=torch.bfloat16)})
    arguments = batch()
    convert_to_fp8_training(model["experts"])
    Fp8Linear.from_linear(model["dense"], "tensorwise")
    want = model["dense"](model["experts"](*arguments))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for module in model.values():
            fully_shard(module, mesh=mesh)
        got = model["dense"](model["experts"](*arguments))
        got.sum().backward()
        assert torch.equal(got, want)
        assert isinstance(model["experts"].down_proj.grad, DTensor)
        assert isinstance(model["dense"].weight.grad, DTensor)
        with pytest.raises(ValueError, match="experts is a FSDPFp8DeepseekV3Experts since it was converted: revert before that"):
            revert_from_fp8_training(model)
    finally:
        distributed.destroy_process_group()
