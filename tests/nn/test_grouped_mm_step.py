"""A whole step of the fp8 grouped product, at a size of training: its launches, capture, torch.compile, signal to noise."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training_step import DEVICE, RECIPES, expected, leaves, offsets, products, sqnr_db, step

from kerneltune.nn import Recipe, fp8_grouped_mm


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_mm_backward_fills_no_zeros(recipe: str) -> None:
    """Autograd makes zeros as large as every output without a gradient, unless it is told not to."""
    a, w = leaves(32, 32, 48, 2)
    y = fp8_grouped_mm(a, w.transpose(1, 2), offsets([16, 32]), recipe=recipe)
    with Dispatched() as seen:
        y.backward(torch.ones_like(y))
    assert not [name for name in seen.names if "zeros" in name or "fill" in name], seen.names


class Dispatched(TorchDispatchMode):
    """The names of the operators that torch calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_mm_step_launches_the_expected_kernels(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # launches of their own
    a, w, offs, dy = step(recipe)
    products(a, w, offs, dy, recipe=recipe)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        products(a, w, offs, dy, recipe=recipe)
        torch.cuda.synchronize()
    launched = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(launched) <= 10, launched


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_mm_graph_follows_its_inputs(recipe: str) -> None:
    a, w, offs, dy = step(recipe)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        products(a, w, offs, dy, recipe=recipe)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = products(a, w, offs, dy, recipe=recipe)
    for ends in (offs, offs // 32 * 16 + (offs == a.shape[0]) * (a.shape[0] - offs // 32 * 16)):
        with torch.no_grad():
            a.copy_(torch.randn_like(a) * 3)
            w.copy_(torch.randn_like(w))
        offs.copy_(ends)
        graph.replay()
        for got, want in zip(captured, products(a, w, offs, dy, recipe=recipe), strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_mm_step_compiles_with_inductor(recipe: str) -> None:
    torch.compiler.reset()
    a, w, offs, dy = step(recipe)
    compiled = torch.compile(lambda a, w: fp8_grouped_mm(a, w.transpose(1, 2), offs, recipe=recipe), fullgraph=True)
    y = compiled(a, w)
    want = products(a, w, offs, dy, recipe=recipe)
    for got, eager in zip((y, *torch.autograd.grad(y, (a, w), dy)), want, strict=True):
        assert torch.equal(got, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_mm_at_a_training_size_has_26_db(recipe: str) -> None:
    M = 4096
    a, w = leaves(M, 1024, 768, 5)
    dy = torch.randn(M, 768, device=DEVICE).bfloat16()
    for ends in ([1008, 1008, 1024, 2496, M], [1000, 1000, 1017, 2500, M]):
        used = Recipe(recipe)
        for got, want in zip(products(a, w, offsets(ends), dy, recipe=used), expected(a, w, ends, dy), strict=True):
            assert sqnr_db(got, want) >= 26
