"""Products of tokens that are cast before they are copied to their experts: the bits of products of copies."""

from collections.abc import Callable

import pytest
import torch

from kerneltune.nn import Recipe, fp8_grouped_mm, permute_tokens, sort_tokens
from kerneltune.nn.grouped_mm import fp8_routed_mm
from kerneltune.nn.kept_weights import KeptWeights
from kerneltune.nn.routing import Routing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
T, K, N, E, TOP_K = 21, 32, 48, 3, 2
TENSORWISE = Recipe("tensorwise")
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def operands() -> tuple[torch.Tensor, torch.Tensor, Routing]:
    x = torch.randn(T, K, device=DEVICE).bfloat16().requires_grad_()
    weight = torch.randn(E, N, K, device=DEVICE).bfloat16().requires_grad_()
    ids = torch.stack([torch.randperm(E, device=DEVICE)[:TOP_K] for _ in range(T)])
    return x, weight, sort_tokens(ids, E)


def step(product: Product, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the result and both gradients."""
    y = product(x, weight.transpose(1, 2))
    torch.manual_seed(3)
    return [y, *torch.autograd.grad(y, (x, weight), torch.randn_like(y))]


def of_copies(routing: Routing, recipe: Recipe) -> Product:
    return lambda x, b_t: fp8_grouped_mm(permute_tokens(x, routing), b_t, routing.offs, recipe=recipe)


@pytest.mark.parametrize("recipe", [TENSORWISE, Recipe("tensorwise", pow2=False), Recipe("tensorwise", keep_weights=False)])
def test_routed_mm_that_casts_before_it_copies_has_the_same_bits(recipe: Recipe) -> None:
    x, weight, routing = operands()
    want = step(of_copies(routing, recipe), x, weight)
    got = step(lambda x, b_t: fp8_routed_mm(x, [b_t], routing, recipe), x, weight)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_routed_mm_with_cast_weights_and_expected_magnitudes_has_the_same_bits() -> None:
    x, weight, routing = operands()
    want = step(of_copies(routing, TENSORWISE), x, weight)
    cast = TENSORWISE.cast_weights(weight.detach().transpose(1, 2))
    kept = KeptWeights(E, weight.device)
    for weights in (cast, kept, kept):
        got = step(lambda x, b_t, weights=weights: fp8_routed_mm(x, [b_t], routing, TENSORWISE, weights=[weights]), x, weight)  # type: ignore[misc]
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


def test_routed_mm_compiles_without_a_graph_break() -> None:
    x, weight, routing = operands()

    def product(x: torch.Tensor, b_t: torch.Tensor) -> torch.Tensor:
        return fp8_routed_mm(x, [b_t], routing, TENSORWISE)

    want = step(product, x, weight)
    got = step(torch.compile(product, backend="aot_eager", fullgraph=True), x, weight)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_routed_mm_of_tokens_without_an_expert_has_zero_gradients() -> None:
    x, weight, _ = operands()
    ids = torch.full((T, TOP_K), E, device=DEVICE)
    ids[:5] = torch.tensor([0, 2], device=DEVICE)
    y, dx, _ = step(lambda x, b_t: fp8_routed_mm(x, [b_t], sort_tokens(ids, E), TENSORWISE), x, weight)
    assert not y[5 * TOP_K :].any()
    assert not dx[5:].any()
    assert dx[:5].any()


def test_routed_mm_of_tokens_of_another_width_raises() -> None:
    x, weight, routing = operands()
    with pytest.raises(ValueError, match="takes A"):
        fp8_routed_mm(x[:, :16], [weight.transpose(1, 2)], routing, TENSORWISE)
