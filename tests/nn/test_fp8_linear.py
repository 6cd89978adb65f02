"""Dense layers in fp8: results, shared casts, which layers convert, compilation."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from asserting import every
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from kerneltune.nn import (
    Fp8Linear,
    Recipe,
    convert_to_fp8_training,
    recipes,
    revert_from_fp8_training,
    set_first_microbatch,
    update_scales,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    """Two projections of a tensor, large enough for fp8 to pay, and layers that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(720, 704), nn.Linear(720, 704, bias=False)
        self.small, self.odd = nn.Linear(32, 32), nn.Linear(720, 700)
        self.to(DEVICE, torch.bfloat16)


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(64, 48, bias, device=DEVICE, dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [(2, 21), (16,), (1,), (0,)], ids=str)
@pytest.mark.parametrize("recipe", ["tensorwise", Recipe("rowwise", pow2=False)], ids=str)
def test_fp8_linear_of_any_number_of_rows_matches_bf16(rows: tuple[int, ...], recipe: str | Recipe) -> None:
    layer = linear()
    x = torch.randn(*rows, 64, device=DEVICE).bfloat16().requires_grad_()
    parameters = (x, *layer.parameters())
    dy = torch.randn(*rows, 48, device=DEVICE).bfloat16()
    want = [layer(x), *torch.autograd.grad(layer(x), parameters, dy)]
    Fp8Linear.from_linear(layer, recipe)
    got = [layer(x), *torch.autograd.grad(layer(x), parameters, dy)]
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert (a.float() - b.float()).norm() <= 0.06 * b.float().norm()


@pytest.mark.parametrize("rows", [(2, 16), (16,), (7,)], ids=str)
def test_fp8_linear_result_can_be_changed_in_place(rows: tuple[int, ...]) -> None:
    layer = linear(bias=False)
    Fp8Linear.from_linear(layer, "tensorwise")
    x = torch.randn(*rows, 64, device=DEVICE).bfloat16().requires_grad_()
    want = torch.autograd.grad((layer(x) + 1).sum(), (x, layer.weight))
    y = layer(x)
    y += 1
    assert every(torch.equal(*pair) for pair in zip(torch.autograd.grad(y.sum(), (x, layer.weight)), want, strict=True))


@pytest.mark.parametrize("rows", [16, 7])
def test_fp8_linear_runs_hooks_once_and_accepts_input_as_a_keyword(rows: int) -> None:
    layer, x, calls = linear(), torch.randn(rows, 64, device=DEVICE).bfloat16(), []
    Fp8Linear.from_linear(layer, "tensorwise")
    want = 2 * layer(x)
    layer.register_forward_hook(lambda _layer, _args, y: calls.append(y.shape) or 2 * y)
    assert torch.equal(layer(input=x), want)
    assert calls == [(rows, 48)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_fp8_linear_of_an_input_changed_through_data_gives_the_new_product(recipe: str) -> None:
    x, layers = torch.randn(16, 64, device=DEVICE).bfloat16(), [linear(bias=False) for _ in range(2)]
    for layer in layers:
        Fp8Linear.from_linear(layer, recipe)
    before = [layer(x) for layer in layers]
    x.data.mul_(2)
    assert every(torch.equal(layer(x), 2 * y) for layer, y in zip(layers, before, strict=True))


def test_compiled_layers_of_one_tensor_cast_it_once() -> None:
    torch.compiler.reset()
    casts: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: object) -> Any:
        targets = [str(node.target) for node in graph.graph.nodes]
        casts.append(sum("fp8_tensorwise_2d" in target for target in targets))
        return make_boxed_func(graph.forward)

    a, b = linear(bias=False), linear(bias=False)
    for layer in (a, b):
        Fp8Linear.from_linear(layer, "tensorwise")
    x = torch.randn(16, 64, device=DEVICE).bfloat16()
    backend = aot_autograd(fw_compiler=counting, partition_fn=min_cut_rematerialization_partition)  # as inductor partitions
    assert torch.equal(torch.compile(lambda x: a(x) + b(x), backend=backend, fullgraph=True)(x), a(x) + b(x))
    assert casts[0] == 1


def test_fp8_linear_keeps_only_operands_of_its_gradients() -> None:
    layer, x = linear(), torch.randn(32, 64, device=DEVICE).bfloat16().requires_grad_()
    Fp8Linear.from_linear(layer, "tensorwise")
    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t.nbytes) and t, lambda t: t):
        layer(x)
    assert sum(kept.values()) == 32 * 64 + 64 * 48 + 2 * 4  # fp8 of x and of the weight, and their scales


@pytest.mark.parametrize("recipe", [Recipe(keep_weights=False), Recipe("rowwise", pow2=False, keep_weights=False)], ids=str)
def test_layer_that_keeps_no_casts_gives_the_bits_of_a_layer_that_keeps_them(recipe: Recipe) -> None:
    layer, x = linear(), torch.randn(2, 16, 64, device=DEVICE).bfloat16().requires_grad_()
    dy, results = torch.randn(2, 16, 48, device=DEVICE).bfloat16(), []
    for how in (dataclasses.replace(recipe, keep_weights=True), recipe):
        Fp8Linear.from_linear(layer, how)
        y = layer(x)
        results.append([y, *torch.autograd.grad(y, (x, *layer.parameters()), dy)])
    assert every(torch.equal(*pair) for pair in zip(*results, strict=True))
    layer.weight.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(layer(x), x, dy)[0], results[0][1])
    layer.weight.requires_grad_()
    assert torch.equal(torch.autograd.grad(layer(x.detach()), layer.weight, dy)[0], results[0][2])


class Gated(nn.Module):
    """A normalization, and a gated layer that reads its result."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((64, 192), (64, 192), (192, 64)))
        self.to(DEVICE, torch.bfloat16)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        x = h.float()
        x = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(h.dtype) * self.scale
        y: torch.Tensor = h + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


def kept_bytes(model: nn.Module, step: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Return the bytes that a step keeps for its backward pass beside parameters and input."""
    h = torch.randn(64, 64, device=DEVICE).bfloat16().requires_grad_()
    own = {t.untyped_storage().data_ptr() for t in (h, *model.parameters())}
    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) and t, lambda t: t
    ):
        step(h).sum().backward()
    return sum(nbytes for address, nbytes in kept.items() if address not in own)


def test_layers_that_keep_no_casts_keep_as_many_bytes_as_in_bf16() -> None:
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), partition_fn=min_cut_rematerialization_partition
    )
    nbytes = {}
    for name, recipe in (("bf16", None), ("casts", Recipe()), ("no casts", Recipe(keep_weights=False))):
        torch.compiler.reset()
        model = Gated()
        for layer in [] if recipe is None else [model.gate, model.up, model.down]:
            Fp8Linear.from_linear(layer, recipe)
        nbytes[name] = kept_bytes(model, model), kept_bytes(model, torch.compile(model, backend=backend, fullgraph=True))
    assert nbytes["no casts"] == nbytes["bf16"]
    assert nbytes["casts"] > nbytes["bf16"]


def test_conversion_printed_counts_layers_of_one_name() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(Attention() for _ in range(3))
    lines = str(convert_to_fp8_training(model, dense=True, filter_fn=lambda _, name: not name.endswith("k"))).splitlines()
    assert lines[0] == "converted 3 modules to fp8: layers.*.q (3)"
    assert "skipped layers.*.k (3): left out by filter_fn" in lines
    assert len(lines) == 4


def test_conversion_lists_skipped_dense_layers_with_reasons() -> None:
    model = Attention()
    before = {name: type(module) for name, module in model.named_modules()}
    conversion = convert_to_fp8_training(model, dense=True, filter_fn=lambda _, name: name != "k")
    assert conversion == ["q"]
    assert isinstance(model.q, Fp8Linear)
    assert set(conversion.skipped) == {"k", "small", "odd"}
    assert "too small" in conversion.skipped["small"]
    assert "multiples of 16, got (700, 720)" in conversion.skipped["odd"]
    assert "skipped k: left out by filter_fn" in str(conversion)
    assert revert_from_fp8_training(model) == ["q"]
    assert {name: type(module) for name, module in model.named_modules()} == before


class Routed(nn.Module):
    """A model with a router beside its experts, and an output layer that no method names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(2048, 704), nn.Embedding(704, 704)
        self.gate, self.experts = nn.Linear(704, 832), nn.ModuleList(nn.Linear(16, 16) for _ in range(832))
        self.layers, self.head = nn.ModuleList([nn.Linear(704, 2048)]), nn.Linear(704, 2048)
        self.hooked, self.double = nn.Linear(704, 704), nn.Linear(704, 704).double()
        self.hooked.forward = self.hooked.forward


def test_convert_skips_output_layers_routers_and_layers_with_another_forward() -> None:
    conversion = convert_to_fp8_training(nn.Sequential(Routed()), dense=True)
    assert conversion == ["0.layers.0"]
    assert conversion.skipped["0.head"] == "the model's output layer"
    assert conversion.skipped["0.gate"] == "a router, which chooses among 832 experts"
    assert "may have a forward of its own" in conversion.skipped["0.hooked"]
    assert "got torch.float64" in conversion.skipped["0.double"]
    with pytest.raises(ValueError, match=r"model must be an nn.Module, got NoneType$"):
        convert_to_fp8_training(None)
    with pytest.raises(ValueError, match=r"0.weight has no shape before the model's first forward pass"):
        convert_to_fp8_training(nn.Sequential(nn.LazyLinear(704)), dense=True)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_kept_weight_is_cast_by_first_microbatches_only_at_its_address(recipe: str) -> None:
    layer, x = (
        Fp8Linear(64, 32, dtype=torch.bfloat16, device=DEVICE, recipe=recipe),
        torch.randn(32, 64, device=DEVICE).bfloat16(),
    )
    set_first_microbatch(layer, True)
    old = layer(x)
    address = layer.fp8_kept.q.data_ptr()
    with torch.no_grad():
        layer.weight.mul_(-1.5)
    set_first_microbatch(layer, False)
    assert torch.equal(layer(x), old)
    set_first_microbatch(layer, True)
    kept = layer(x)
    assert layer.fp8_kept.q.data_ptr() == address
    set_first_microbatch(layer, None)
    assert torch.equal(layer(x), kept)


def test_dense_layers_compile_without_a_graph_break() -> None:
    torch.compiler.reset()
    model = nn.Sequential(linear(), nn.GELU())
    Fp8Linear.from_linear(model[0], "tensorwise")
    x = torch.randn(16, 64, device=DEVICE).bfloat16().requires_grad_()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    (got,), (want,) = (torch.autograd.grad(m(x).sum(), x) for m in (whole, model))
    assert torch.equal(got, want)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_convert_after_torch_compile_warns_and_runs_in_fp8() -> None:
    torch.compiler.reset()
    model, x = nn.Sequential(nn.Linear(720, 704)).to(DEVICE, torch.bfloat16), torch.randn(16, 720, device=DEVICE).bfloat16()
    model[0].compile(backend="eager")
    before = model(x)
    with pytest.warns(UserWarning, match=r"compiled before the conversion, compiles again at the next call: 0$"):
        conversion = convert_to_fp8_training(model, dense=True)
    assert "compiles again at the next call: 0" in str(conversion)
    got = model(x)
    assert not torch.equal(got, before)
    assert torch.equal(got, copy.deepcopy(model)(x))


def test_convert_of_no_suitable_layer_raises_with_grouped_names() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(32, 32) for _ in range(40))})
    with pytest.raises(ValueError, match=r"skipped: layers.\* \(40\): 32 x 32 is too small") as raised:
        convert_to_fp8_training(model, dense=True)
    assert len(str(raised.value)) < 300


def test_layers_that_share_a_weight_add_their_gradients() -> None:
    a, b = linear(False), linear(False)
    b.weight = a.weight
    x = torch.randn(16, 64, device=DEVICE).bfloat16()
    for layer in (a, b):
        Fp8Linear.from_linear(layer, "tensorwise")
    (alone,) = torch.autograd.grad(a(x).sum(), a.weight)
    (both,) = torch.autograd.grad(a(x).sum() + b(x).sum(), a.weight)
    assert torch.equal(both, 2 * alone)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Linear(64, 40), r"multiples of 16, got \(40, 64\)"),
        (nn.Linear(0, 16), r"multiples of 16, got \(16, 0\)"),
        (nn.Linear(16, 16, dtype=torch.float64), "weight must be one of .*, got torch.float64"),
        (nn.Bilinear(16, 16, 16), "from_linear takes an nn.Linear, got Bilinear"),
    ],
    ids=["size", "empty", "type", "kind"],
)
def test_convert_of_a_layer_that_fp8_cannot_run_raises_and_keeps_it(layer: nn.Module, message: str) -> None:
    kind = type(layer)
    with pytest.raises(ValueError, match=message):
        Fp8Linear.from_linear(layer, "tensorwise")
    assert type(layer) is kind


def test_fp8_linear_of_an_input_of_another_size_or_device_raises() -> None:
    layer = Fp8Linear(64, 48, device=DEVICE)
    with pytest.raises(ValueError, match=r"Fp8Linear takes \(…, 64\)"):
        layer(torch.randn(16, 48, device=DEVICE))
    with pytest.raises(ValueError, match="on meta"):
        layer(torch.randn(16, 64, device="meta"))


@pytest.mark.parametrize("is_on_meta", [False, True])
def test_delayed_scaling_of_a_dense_layer_uses_scales_of_the_last_step(is_on_meta: bool) -> None:
    layer, x = linear(), torch.randn(16, 64, device=DEVICE).bfloat16()
    want, state = layer(x), layer.state_dict()
    Fp8Linear.from_linear(layer.to("meta") if is_on_meta else layer, "delayed")
    layer.load_state_dict(state, assign=True)
    for _ in range(2):
        assert (layer(x) - want).float().norm() < 0.06 * want.float().norm()
        layer(x).sum().backward()
        assert update_scales(layer) == 1
    assert bool(layer.fp8_scaling.known)


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels run on the GPU")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_fp8_linear_without_gpu_and_interpreter_raises(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = linear()
    Fp8Linear.from_linear(layer, recipe)
    monkeypatch.setattr(recipes, "INTERPRETED", False)
    with pytest.raises(
        ValueError, match=r"weights must be on a GPU, or kernels interpreted \(TRITON_INTERPRET=1\), got weights on cpu"
    ):
        layer(torch.randn(16, 64).bfloat16())
