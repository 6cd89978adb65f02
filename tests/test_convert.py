"""Existing models to fp8 training: which products change, that names and state stay, copies, compilation."""

import copy

import pytest
import torch
from torch import nn

from kerneltune.nn import GroupedLinear, Recipe, convert_to_fp8_training, fp8_grouped_mm

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
    """Both kinds of expert layers, and a dense one."""

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
def test_all_expert_layers_of_a_model(recipe: str | Recipe) -> None:
    model, (x, offs) = Model(), batch()
    names, before = list(model.state_dict()), model(x, offs)
    assert convert_to_fp8_training(model, recipe) == ["experts", "grouped"]
    assert list(model.state_dict()) == names and isinstance(model.experts, Experts)
    y, want = model(x, offs), by_hand(model, x, offs, recipe)
    assert torch.equal(y, want) and not torch.equal(y, before)
    dy = torch.randn_like(y)
    parameters = list(model.parameters())
    for got, expected in zip(*(torch.autograd.grad(out, parameters, dy) for out in (y, want)), strict=True):
        assert torch.equal(got, expected)


def test_a_second_conversion_takes_the_place_of_the_first() -> None:
    model, (x, offs) = Model(), batch()
    for recipe in ("rowwise", "tensorwise"):
        convert_to_fp8_training(model, recipe)
    assert torch.equal(model(x, offs), by_hand(model, x, offs, "tensorwise"))
    assert type(model.experts).__mro__[1] is Experts


def test_what_the_filter_leaves_out_stays() -> None:
    model = Model()
    kind = type(model.experts)
    assert convert_to_fp8_training(model, filter_fn=lambda module, name: name != "experts") == ["grouped"]
    assert type(model.experts) is kind and model.grouped.recipe == Recipe("tensorwise")
    with pytest.raises(ValueError, match="Model has no expert weights"):
        convert_to_fp8_training(model, filter_fn=lambda module, name: False)
    with pytest.raises(ValueError, match="Linear has no expert weights"):
        convert_to_fp8_training(model.dense)
    with pytest.raises(ValueError, match="got 'int4'"):
        convert_to_fp8_training(model, "int4")


def test_copies_of_a_converted_model() -> None:
    model, (x, offs) = Model(), batch()
    convert_to_fp8_training(model)
    other = copy.deepcopy(model)
    assert torch.equal(other(x, offs), model(x, offs))
    fresh = Model()
    fresh.load_state_dict(model.state_dict())
    convert_to_fp8_training(fresh)
    assert torch.equal(fresh(x, offs), model(x, offs))


def test_only_products_with_expert_weights_change() -> None:
    class Others(Experts):
        def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x.t().contiguous(), x, offs).relu()  # (E, K, K), between two matrices

    module, (x, offs) = Others(), batch()
    plain = module(x, offs)
    convert_to_fp8_training(module)
    assert torch.equal(module(x, offs), plain)


def test_compilation() -> None:
    torch.compiler.reset()
    model, (x, offs) = Model(), batch()
    convert_to_fp8_training(model)
    want = model(x, offs)
    assert torch.equal(torch.compile(model, backend="aot_eager")(x, offs), want)
    hidden = model.experts(x, offs)
    whole = torch.compile(lambda x: model.dense(model.grouped(x, offs)), fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(hidden), want)
