"""Routing with autograd: values and gradients as torch's own index operators have them, fakes, graphs."""

import pytest
import torch

from kerneltune import nn

WHERE = "cuda" if torch.cuda.is_available() else "cpu"


def ids_of(T: int, K: int, E: int, dropped: bool) -> torch.Tensor:
    ids = torch.rand(T, E, device=WHERE).topk(K).indices
    return torch.where(torch.rand(T, K, device=WHERE) < 0.3, -1, ids) if dropped else ids


def by_torch(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor | None, factors: torch.Tensor) -> torch.Tensor:
    """Return each token times the factor of each of its experts, weighted and summed."""
    out = torch.zeros_like(x)
    for choice in range(ids.shape[1]):
        of = ids[:, choice]
        part = x * factors[of.clamp(min=0)] * (of >= 0)[:, None]
        out = out + (part if weights is None else part * weights[:, choice, None])
    return out


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_permute_and_unpermute_have_values_and_gradients_of_torch(dropped: bool, weighted: bool) -> None:
    T, H, K, E = 23, 40, 3, 5
    ids = ids_of(T, K, E, dropped)
    factors = torch.randn(E, H, device=WHERE)
    results = []
    x0, w0, g = torch.randn(T, H, device=WHERE), torch.rand(T, K, device=WHERE), torch.randn(T, H, device=WHERE)
    for ours in (True, False):
        x, w = x0.clone().requires_grad_(), w0.clone().requires_grad_()
        if ours:
            routing = nn.sort_tokens(ids, E)
            y = nn.permute_tokens(x, routing)
            expert = torch.bucketize(torch.arange(T * K, device=WHERE), routing.offs, right=True).clamp(max=E - 1)
            out = nn.unpermute_tokens(y * factors[expert], routing, w if weighted else None)
        else:
            out = by_torch(x, ids, w if weighted else None, factors)
        out.backward(g)
        results.append((out.detach(), x.grad, w.grad))
    for name, got, want in zip(("out", "dx", "dweights"), *results, strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, msg=name)


def test_sort_tokens_keeps_the_order_of_tokens_within_an_expert() -> None:
    ids = torch.tensor([[1, 0], [1, 2], [0, 1], [9, 1]], device=WHERE)
    routing = nn.sort_tokens(ids, 3)
    assert routing.offs.tolist() == [2, 6, 7]
    assert routing.pairs.tolist() == [1, 4, 0, 2, 5, 7, 3, -1]
    assert routing.places.tolist() == [[2, 0], [3, 6], [1, 4], [-1, 5]]


@pytest.mark.parametrize("K", [1, 2])
def test_permute_and_unpermute_of_places_outside_access_nothing(K: int) -> None:
    T, H = 4, 16
    places = torch.full((T, K), 2**30, dtype=torch.int32, device=WHERE)
    places[1] = -7
    offs = torch.tensor([-5, 1 << 30], dtype=torch.int32, device=WHERE)
    routing = nn.Routing(torch.zeros(T * K, dtype=torch.int32, device=WHERE), places, offs)
    x = torch.randn(T, H, device=WHERE)
    assert nn.permute_tokens(x, routing).shape == (T * K, H)
    assert (nn.unpermute_tokens(torch.randn(T * K, H, device=WHERE), routing, torch.ones(T, K, device=WHERE)) == 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda r: nn.sort_tokens(torch.zeros(3, 2), 4), r"ids must be contiguous int32 or int64 \(T, K\)"),
        (lambda r: nn.sort_tokens(torch.zeros(3, 2, dtype=torch.int32), 0), "num_experts must be 1 to 1024, got 0"),
        (lambda r: nn.permute_tokens(torch.zeros(5, 8, device=WHERE), r), r"places must be contiguous int32 \(5, any\)"),
        (lambda r: nn.permute_tokens(torch.zeros(4, 8, device=WHERE).long(), r), "x must be a matrix of bfloat16"),
        (lambda r: nn.unpermute_tokens(torch.zeros(7, 8, device=WHERE), r), r"y must be \(8, H\)"),
        (
            lambda r: nn.unpermute_tokens(torch.zeros(8, 8, device=WHERE), r, torch.zeros(4, device=WHERE)),
            r"weights must be contiguous \(4, 2\)",
        ),
    ],
)
def test_routing_functions_with_wrong_arguments_raise(call, message: str) -> None:  # type: ignore[no-untyped-def]
    routing = nn.sort_tokens(ids_of(4, 2, 3, False), 3)
    with pytest.raises(ValueError, match=message):
        call(routing)


def test_routing_operators_have_fakes_and_gradients() -> None:
    routing = nn.sort_tokens(ids_of(8, 2, 3, False), 3)
    x = torch.randn(8, 16, device=WHERE, requires_grad=True)
    y = torch.randn(16, 16, device=WHERE, requires_grad=True)
    tests = ("test_schema", "test_faketensor")
    operators = torch.ops.kerneltune
    torch.library.opcheck(operators.moe_sort, (ids_of(8, 2, 3, False), 3), test_utils=tests)
    torch.library.opcheck(operators.moe_permute, (x, routing.places, routing.offs), test_utils=tests)
    weights = torch.rand(8, 2, device=WHERE)
    torch.library.opcheck(operators.moe_combine, (y, routing.places, routing.offs, weights), test_utils=tests)


@pytest.mark.gpu
def test_graph_of_routing_routes_other_tokens() -> None:
    ids, x = ids_of(300, 4, 16, False).contiguous(), torch.randn(300, 64, device=WHERE)

    def step() -> torch.Tensor:
        routing = nn.sort_tokens(ids, 16)
        return nn.unpermute_tokens(nn.permute_tokens(x, routing), routing)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    ids.copy_(ids_of(300, 4, 16, False))
    graph.replay()
    torch.testing.assert_close(out, x * 4)


def test_sort_tokens_on_a_cpu_without_the_interpreter_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kerneltune.nn.routing.INTERPRETED", False)
    with pytest.raises(ValueError, match=r"ids must be on a GPU, or kernels interpreted \(TRITON_INTERPRET=1\), got ids on cpu"):
        nn.sort_tokens(torch.zeros(4, 2, dtype=torch.int64), 4)
