"""Existing models to fp8 training: which products change, that names and state stay, copies, compilation."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from kerneltune.nn import GroupedLinear, Recipe, convert_to_fp8_training, fp8_grouped_mm, revert_from_fp8_training

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E, K, N, M = 2, 32, 16, 32


class Experts(nn.Module):
    """Somebody's expert layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(E, N, K, device=DEVICE).bfloat16())
        self.down = nn.Parameter(torch.randn(E, K, N, device=DEVICE).bfloat16())

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        hidden = torch._grouped_mm(x, self.up.transpose(1, 2), offs).relu()
        return torch._grouped_mm(hidden, self.down.transpose(1, 2), offs=offs)


class Model(nn.Module):
    """Both kinds of expert layers, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()
        self.grouped = GroupedLinear(E, K, N, recipe=None, device=DEVICE, dtype=torch.bfloat16)
        self.dense = nn.Linear(N, N, device=DEVICE, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.dense(self.grouped(self.experts(x, offs), offs))
        return y


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(M, K, device=DEVICE).bfloat16(), torch.tensor([16, M], dtype=torch.int32, device=DEVICE)


def by_hand(model: Model, x: torch.Tensor, offs: torch.Tensor, recipe: str | Recipe) -> torch.Tensor:
    hidden = fp8_grouped_mm(x, model.experts.up.transpose(1, 2), offs, recipe=recipe).relu()
    y = fp8_grouped_mm(hidden, model.experts.down.transpose(1, 2), offs, recipe=recipe)
    return model.dense(fp8_grouped_mm(y, model.grouped.weight.transpose(1, 2), offs, recipe=recipe))


@pytest.mark.parametrize("recipe", ["tensorwise", Recipe("rowwise", pow2=False)], ids=str)
def test_convert_of_a_model_converts_every_expert_layer(recipe: str | Recipe) -> None:
    model, (x, offs) = Model(), batch()
    names, before = list(model.state_dict()), model(x, offs)
    assert convert_to_fp8_training(model, recipe) == ["experts", "grouped"]
    assert list(model.state_dict()) == names
    assert isinstance(model.experts, Experts)
    assert "recipe=Recipe(scaling=" in repr(model.experts)
    y, want = model(x, offs), by_hand(model, x, offs, recipe)
    assert torch.equal(y, want)
    assert not torch.equal(y, before)
    dy = torch.randn_like(y)
    parameters = list(model.parameters())
    for got, expected in zip(*(torch.autograd.grad(out, parameters, dy) for out in (y, want)), strict=True):
        assert torch.equal(got, expected)


def test_convert_twice_replaces_the_recipe_with_a_warning() -> None:
    model, (x, offs) = Model(), batch()
    convert_to_fp8_training(model, "rowwise")
    outer = type("Sharded", (type(model.experts),), {})  # as FSDP makes them
    model.experts.__class__ = outer
    with pytest.warns(UserWarning, match=r"in fp8 already, with the recipe Recipe\(.*tensorwise.*: experts, grouped$"):
        assert "in fp8 already" in str(convert_to_fp8_training(model, "tensorwise"))
    assert torch.equal(model(x, offs), by_hand(model, x, offs, "tensorwise"))
    assert type(model.experts) is outer


def test_converted_layers_of_two_models_have_the_same_class() -> None:
    model, other = Model(), Model()
    convert_to_fp8_training(model, "rowwise")
    convert_to_fp8_training(other, "tensorwise")
    assert type(model.experts) is type(other.experts)


def test_convert_with_a_filter_skips_layers_that_it_rejects() -> None:
    model = Model()
    kind = type(model.experts)
    assert convert_to_fp8_training(model, filter_fn=lambda module, name: name != "experts") == ["grouped"]
    assert type(model.experts) is kind
    assert model.grouped.recipe == Recipe("tensorwise")
    with pytest.raises(ValueError, match=r"Model has no expert weights.*grouped: left out by filter_fn"):
        convert_to_fp8_training(model, filter_fn=lambda module, name: False)
    for other in (model.dense, nn.Conv1d(16, 16, 3)):
        with pytest.raises(ValueError, match=f"{type(other).__name__} has no expert weights"):
            convert_to_fp8_training(other)
    with pytest.raises(ValueError, match="got 'int4'"):
        convert_to_fp8_training(model, "int4")


def test_copies_of_a_converted_model_give_the_same_results() -> None:
    model, (x, offs) = Model(), batch()
    convert_to_fp8_training(model)
    other = copy.deepcopy(model)
    assert torch.equal(other(x, offs), model(x, offs))
    fresh = Model()
    fresh.load_state_dict(model.state_dict())
    convert_to_fp8_training(fresh)
    assert torch.equal(fresh(x, offs), model(x, offs))


Forward = Callable[["Single", torch.Tensor, torch.Tensor], torch.Tensor]


class Single(nn.Module):
    """A layer with a single weight (E, N, K) and its own forward pass."""

    def __init__(self, forward: Forward, **modules: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, N, K, device=DEVICE).bfloat16())
        self.forward_of = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return self.forward_of(self, x, offs)


def product(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(x, weight.mT, offs)


def plain(layer: nn.Module, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return product(x, layer.weight, offs)


@pytest.mark.parametrize(
    "weights",
    [
        lambda w: w.transpose(-2, -1),
        lambda w: w.float().bfloat16().mT,
        lambda w: torch.cat([w, w], 1).chunk(2, 1)[0].mT,
        lambda w: w[torch.arange(E, device=DEVICE)].mT,
        lambda w: w.mT.contiguous(),
        lambda w: w.repeat(1, 1, 2)[..., :K].mT,
    ],
    ids=["view", "other type and back", "half of both", "chosen experts", "row-major", "neither order"],
)
def test_converted_weights_of_any_shape_give_the_grouped_product(weights: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module, (x, offs) = Single(lambda self, x, offs: torch._grouped_mm(x, weights(self.weight), offs)), batch()
    x.requires_grad_()
    want = fp8_grouped_mm(x, module.weight.mT, offs)
    convert_to_fp8_training(module)
    got, dy = module(x, offs), torch.randn_like(want)
    assert torch.equal(got, want)
    for gradient, expected in zip(*(torch.autograd.grad(y, (x, module.weight), dy) for y in (got, want)), strict=True):
        assert torch.equal(gradient, expected)


def test_converted_module_multiplies_by_public_grouped_mm_in_fp8() -> None:
    module, (x, offs) = Single(lambda self, x, offs: nn.functional.grouped_mm(x, self.weight.mT, offs=offs)), batch()
    want = fp8_grouped_mm(x, module.weight.mT, offs)
    assert not torch.equal(module(x, offs), want)
    convert_to_fp8_training(module)
    assert torch.equal(module(x, offs), want)


def test_converted_row_major_parameters_give_the_grouped_product() -> None:
    class RowMajor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(E, K, N, device=DEVICE).bfloat16())

        def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x.t().contiguous().t(), self.up, offs)

    module, (x, offs) = RowMajor(), batch()
    convert_to_fp8_training(module)
    assert torch.equal(module(x, offs), fp8_grouped_mm(x, module.up.mT.contiguous().mT, offs))


def test_linear_layer_with_expert_weights_keeps_its_forward() -> None:
    class Stacked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(K, N, bias=False)
            self.weight = nn.Parameter(torch.randn(E, N, K, device=DEVICE).bfloat16())

        def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return product(x, self.weight, offs)

    module, (x, offs) = Stacked(), batch()
    assert convert_to_fp8_training(module, experts=True) == [""]
    assert torch.equal(module(x, offs), fp8_grouped_mm(x, module.weight.mT, offs))


def test_converted_module_with_parameters_in_lists_multiplies_in_fp8() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lists = nn.ModuleList([nn.ParameterList([torch.randn(E, N, K, device=DEVICE).bfloat16()]), nn.Linear(K, K)])

        def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return product(x, self.lists[0][0], offs)

    model, (x, offs) = nn.ModuleDict({"experts": Lists()}), batch()
    layer, names, before = model["experts"], list(model.state_dict()), model["experts"](x, offs)
    assert convert_to_fp8_training(model) == ["experts"]
    want = fp8_grouped_mm(x, layer.lists[0][0].mT, offs)
    assert torch.equal(layer(x, offs), want)
    other = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="in fp8 already"):
        convert_to_fp8_training(model, "rowwise")
    assert torch.equal(layer(x, offs), fp8_grouped_mm(x, layer.lists[0][0].mT, offs, recipe="rowwise"))
    assert torch.equal(other["experts"](x, offs), want)
    assert list(model.state_dict()) == names
    assert revert_from_fp8_training(model) == ["experts"]
    assert torch.equal(layer(x, offs), before)
    assert type(layer.lists[0]) is nn.ParameterList


@pytest.mark.parametrize("inner", ["left out", "in bf16", "in bf16, of fp32 weights"])
def test_converted_module_leaves_modules_inside_unconverted(inner: str) -> None:
    if inner == "left out":
        child: nn.Module = Single(plain)
    else:
        dtype = torch.float32 if "fp32" in inner else torch.bfloat16
        child = GroupedLinear(E, K, N, recipe=None, device=DEVICE, dtype=dtype)
    module, (x, offs) = Single(lambda self, x, offs: plain(self, x, offs) + self.child(x, offs), child=child), batch()
    want = fp8_grouped_mm(x, module.weight.mT, offs) + child(x, offs)
    assert convert_to_fp8_training(module, filter_fn=lambda _, name: not name) == [""]
    assert torch.equal(module(x, offs), want)
    assert convert_to_fp8_training(child, "rowwise") == [""]
    want = fp8_grouped_mm(x, module.weight.mT, offs) + fp8_grouped_mm(x, child.weight.mT, offs, recipe="rowwise")
    assert torch.equal(module(x, offs), want)


@pytest.mark.parametrize(
    "other",
    [
        lambda x, w, offs: torch._grouped_mm(x.t().contiguous(), x, offs),  # (E, K, K), between two matrices
        lambda x, w, offs: torch._grouped_mm(x, x.view(E, N, K).mT, offs),
        lambda x, w, offs: torch.vmap(lambda w: x @ w.t())(w.detach()),
        lambda x, w, offs: torch.bmm(w, x.view(2, K, M // 2)),
        lambda x, w, offs: x @ w[0].t(),
    ],
    ids=["of rows", "not with weights", "vmap", "from the left", "of one expert"],
)
def test_forward_without_grouped_products_of_its_weights_raises(other: Callable[..., torch.Tensor]) -> None:
    module, (x, offs) = Single(lambda self, x, offs: other(x, self.weight, offs)), batch()
    convert_to_fp8_training(module)
    with pytest.raises(ValueError, match=r"Single was converted, but its forward pass makes no grouped .* weights weight:"):
        module(x, offs)


def test_weight_without_a_product_beside_one_with_raises() -> None:
    class Half(Experts):
        def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            hidden = torch._grouped_mm(x, self.up.mT, offs).relu()
            return torch.einsum("mn,kn->mk", hidden, self.down[0])

    module = Half()
    convert_to_fp8_training(module)
    with pytest.raises(ValueError, match=r"Half was converted, but .* expert weights down: leave it out by filter_fn"):
        module(*batch())


def embed(layer: nn.Module, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return nn.functional.embedding(x.argmax(1) % N, layer.weight[0])


def test_convert_skips_a_module_without_a_product_with_a_reason() -> None:
    model = nn.ModuleDict({"positions": Single(embed), "experts": Experts()})
    conversion = convert_to_fp8_training(model)
    assert conversion == ["experts"]
    assert "positions: the code of Single.forward makes no grouped or batched product" in str(conversion)
    assert model["positions"](*batch()).shape == (M, K)
    tables = nn.ModuleDict({"experts": Experts(), "table": Single(embed)})
    tables["table"].weight = nn.Parameter(torch.randn(E, 20, 36))
    assert "the code of Single.forward" in convert_to_fp8_training(tables).skipped["table"]
    with pytest.raises(ValueError, match=r"Single has no expert weights.*skipped: Single: the code of Single.forward"):
        convert_to_fp8_training(model["positions"])


@pytest.mark.parametrize(
    "product",
    [
        lambda x, w: torch.bmm(x, w.mT),
        lambda x, w: x @ w.mT,
        lambda x, w: torch.matmul(x, w.transpose(1, 2)),
        lambda x, w: torch._grouped_mm(x, w.mT),
        lambda x, w: torch.bmm(input=x, mat2=w.mT),
        lambda x, w: torch.matmul(x, other=w.mT),
    ],
    ids=["bmm", "operator", "matmul", "grouped without offsets", "named operands", "named weight"],
)
def test_batched_products_of_expert_weights_run_in_fp8(product: Callable[..., torch.Tensor]) -> None:
    module, (x, _) = Single(lambda self, x, offs: product(x.view(E, -1, K), self.weight)), batch()
    offs = torch.tensor([M // 2, M], dtype=torch.int32, device=DEVICE)
    want = fp8_grouped_mm(x, module.weight.mT, offs).view(E, M // 2, N)
    convert_to_fp8_training(module)
    assert torch.equal(module(x, offs), want)


@pytest.mark.skipif(DEVICE != "cpu", reason="a group of one process on the CPU")
def test_converted_module_with_sharded_weights_trains() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        local, whole, (x, offs) = Single(lambda self, x, offs: product(x, self.weight.to_local(), offs)), Single(plain), batch()
        want = fp8_grouped_mm(x, local.weight.mT, offs), fp8_grouped_mm(x, whole.weight.mT, offs)
        local.weight = nn.Parameter(distribute_tensor(local.weight.detach(), mesh, [Shard(0)]))
        for module in (local, whole):
            convert_to_fp8_training(module)
        fully_shard(whole, mesh=mesh)
        for module, expected in zip((local, whole), want, strict=True):
            y = module(x, offs)
            y.backward(torch.randn_like(y))
            assert torch.equal(y, expected)
            assert isinstance(module.weight.grad, DTensor)
        layer = GroupedLinear(E, K, N, dtype=torch.bfloat16)
        fully_shard(layer, mesh=mesh)
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        for first in (True, False, False):  # what FSDP gathers after a step has no new version, and maybe the same address
            y = layer(x, offs, is_first_microbatch=first)
            assert torch.equal(y, layer(x, offs))
            y.sum().backward()
            optimizer.step()
        layer = GroupedLinear(E, K, N, dtype=torch.bfloat16)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        for first in (None, True):
            with pytest.raises(ValueError, match=r"B_t must be a plain tensor, as to_local\(\) of a DTensor is, got DTensor"):
                layer(x, offs, is_first_microbatch=first)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("reentrant", [True, False])
def test_converted_module_under_activation_checkpointing_has_the_same_gradients(reentrant: bool) -> None:
    module, (x, offs) = Single(plain), batch()
    convert_to_fp8_training(module)
    x.requires_grad_()
    dy = torch.randn(M, N, device=DEVICE).bfloat16()
    want = torch.autograd.grad(module(x, offs), (x, module.weight), dy)
    checkpoint(module, x, offs, use_reentrant=reentrant).backward(dy)
    assert torch.equal(x.grad, want[0])
    assert torch.equal(module.weight.grad, want[1])
    inside = Single(lambda self, x, offs: checkpoint(plain, self, x, offs, use_reentrant=reentrant))
    inside.load_state_dict(module.state_dict())
    convert_to_fp8_training(inside)
    x.grad = None
    inside(x, offs).backward(dy)
    assert torch.equal(x.grad, want[0])
    assert torch.equal(inside.weight.grad, want[1])


def test_converted_layers_keep_the_expected_magnitudes_of_each_weight() -> None:
    model, (x, offs) = Model(), batch()
    convert_to_fp8_training(model)
    want = model(x.requires_grad_(), offs)
    experts = model.experts
    largest = [w.detach().abs().amax((1, 2)).float() for w in (experts.up, experts.down)]
    kept = [experts.fp8.up_kept.amax, experts.fp8.down_kept.amax]
    assert [torch.equal(*pair) for pair in zip(kept, largest, strict=True)] == [True, True]
    assert torch.equal(model(x, offs), want)


def test_converted_model_compiled_has_the_same_results() -> None:
    torch.compiler.reset()
    model, (x, offs) = Model(), batch()
    convert_to_fp8_training(model)
    want = model(x, offs)
    assert torch.equal(torch.compile(model, backend="aot_eager")(x, offs), want)
    hidden = model.experts(x, offs)
    whole = torch.compile(lambda x: model.dense(model.grouped(x, offs)), fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(hidden), want)


@pytest.mark.parametrize("field", ["dense", "experts"])
def test_convert_with_an_option_that_is_no_bool_raises(field: str) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: 'no': expected True or False$"):
        convert_to_fp8_training(torch.nn.Linear(64, 64), **{field: "no"})


def test_model_whose_output_embeddings_fail_is_converted() -> None:
    class Model(nn.Sequential):
        def get_output_embeddings(self) -> nn.Module:
            raise RuntimeError("not built yet")

    model = Model(*(nn.Linear(4096, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)))
    assert list(convert_to_fp8_training(model, dense=True)) == ["0", "1"]
