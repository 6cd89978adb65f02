"""Experts as a single function: the products of rows that SwiGLU gates, up to a rounding of the gate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from kerneltune.kernel_lib.groups import aligned_size
from kerneltune.nn import Recipe, fp8_grouped_mm, sort_tokens
from kerneltune.nn.grouped_mm import fp8_routed_mm
from kerneltune.nn.kept_weights import KeptWeights
from kerneltune.nn.routing import Routing
from kerneltune.nn.swiglu import swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, K, INNER, N, E, TOP_K = 9, 16, 32, 48, 3, 1
TENSORWISE = Recipe("tensorwise")
Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def operands(experts: int = E) -> tuple[list[torch.Tensor], Routing]:
    """Return x, up and down, and a routing to the first of the experts."""
    x = torch.randn(T, K, device=DEVICE).bfloat16().requires_grad_()
    up = torch.randn(E, 2 * INNER, K, device=DEVICE).bfloat16().requires_grad_()
    down = torch.randn(E, N, INNER, device=DEVICE).bfloat16().requires_grad_()
    ids = torch.stack([torch.randperm(experts, device=DEVICE)[:TOP_K] for _ in range(T)])
    return [x, up, down], sort_tokens(ids, E)


def step(experts: Experts, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the result and the gradients of all tensors with a gradient."""
    x, up, down = tensors
    y = experts(x, up.transpose(1, 2), down.transpose(1, 2))
    torch.manual_seed(3)
    return [y.detach(), *torch.autograd.grad(y, [t for t in tensors if t.requires_grad], torch.randn_like(y))]


def as_one(routing: Routing, recipe: Recipe = TENSORWISE) -> Experts:
    return lambda x, up, down: fp8_routed_mm(x, [up, down], routing, recipe)


def by_parts(routing: Routing, recipe: Recipe = TENSORWISE) -> Experts:
    def run(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return fp8_grouped_mm(swiglu(fp8_routed_mm(x, [up], routing, recipe)), down, routing.offs, recipe=recipe)

    return run


@pytest.mark.parametrize(("recipe", "experts"), [(TENSORWISE, E), (Recipe("tensorwise", keep_weights=False), 1)])
def test_experts_mm_equals_its_products_one_by_one(recipe: Recipe, experts: int) -> None:
    tensors, routing = operands(experts)
    for got, want in zip(step(as_one(routing, recipe), tensors), step(by_parts(routing, recipe), tensors), strict=True):
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        difference = (got.float() - want.float()).norm()
        assert float(difference / want.float().norm()) < 0.05  # steps of fp8 where the gate is rounded otherwise


def test_experts_mm_with_frozen_operands_has_the_same_other_gradients() -> None:
    tensors, routing = operands()
    want = step(as_one(routing), tensors)
    for frozen in ((0,), (1, 2), (0, 2), (0, 1)):
        for index, tensor in enumerate(tensors):
            tensor.requires_grad_(index not in frozen)
        got = step(as_one(routing), tensors)
        rest = [gradient for index, gradient in enumerate(want[1:]) if index not in frozen]
        for a, b in zip(got, [want[0], *rest], strict=True):
            assert torch.equal(a, b), frozen


def test_experts_mm_with_cast_weights_and_expected_magnitudes_has_the_same_bits() -> None:
    tensors, routing = operands()
    want = step(as_one(routing), tensors)
    cast = [TENSORWISE.cast_weights(t.detach().transpose(1, 2)) for t in tensors[1:]]
    kept = [KeptWeights(E, torch.device(DEVICE)) for _ in range(2)]
    for weights in (cast, kept, kept):

        def run(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, weights: list[Any] = weights) -> torch.Tensor:
            return fp8_routed_mm(x, [up, down], routing, TENSORWISE, weights)

        for a, b in zip(step(run, tensors), want, strict=True):
            assert torch.equal(a, b)


def test_experts_mm_compiles_without_a_graph_break() -> None:
    tensors, routing = operands()
    want = step(as_one(routing), tensors)
    got = step(torch.compile(as_one(routing), backend="aot_eager", fullgraph=True), tensors)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_experts_mm_without_gradients_keeps_nothing() -> None:
    tensors, routing = operands()
    with torch.no_grad():
        y = as_one(routing)(tensors[0], tensors[1].transpose(1, 2), tensors[2].transpose(1, 2))
    assert y.grad_fn is None
    assert torch.equal(y, step(as_one(routing), tensors)[0])


def test_experts_mm_of_weights_that_do_not_fit_raises() -> None:
    (x, up, down), routing = operands()
    with pytest.raises(ValueError, match=r"weights must be \(E, K, 2I\) and \(E, I, N\), got \(3, 16, 64\) and \(3, 16, 48\)"):
        as_one(routing)(x, up.transpose(1, 2), down.transpose(1, 2)[:, :16].contiguous())


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("keep_weights", [True, False])
def test_experts_mm_keeps_only_operands_of_its_gradients(keep_weights: bool, is_compiled: bool) -> None:
    (x, up, down), routing = operands()
    experts = as_one(routing, Recipe("tensorwise", keep_weights=keep_weights))
    if is_compiled:
        torch.compiler.reset()
        partitions = {"partition_fn": min_cut_rematerialization_partition}  # as inductor partitions
        backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), **partitions)
        experts = torch.compile(experts, backend=backend, fullgraph=True)
    kept: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) and t, lambda t: t
    ):
        experts(x, up.transpose(1, 2), down.transpose(1, 2))
    own = {t.untyped_storage().data_ptr() for t in (x, up, down, *routing)}
    aligned = aligned_size(T * TOP_K, E)
    rows = 2 * T * TOP_K * 2 * INNER + aligned * (K + INNER) + 2 * 4  # H in bf16, X and the gated rows in fp8, two scales
    weights = E * (K * 2 * INNER + INNER * N) + 2 * 4 * E if keep_weights else 0
    assert sum(nbytes for address, nbytes in kept.items() if address not in own) == rows + weights
