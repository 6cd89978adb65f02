"""Route as models do it with torch's own index operators, eagerly and compiled."""

import torch

from kerneltune.kernel_lib.compiled import call_compiled
from kerneltune.kernel_lib.groups import aligned_size, aligned_starts
from kerneltune.ops.moe_routing.common import sorted_pairs
from kerneltune.spec import Case, Inputs, Outputs


def _sort(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return sorted_pairs(ids, num_experts)


def sort(compiled: bool, inputs: Inputs, _config: None) -> Outputs:
    """Sort by argsort, bincount and cumsum."""
    call = call_compiled if compiled else _called
    pairs, places, offs = call(_sort, (inputs["ids"],), inputs["num_experts"])
    return {"pairs": pairs, "places": places, "offs": offs}


def _permute(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    T, K = places.shape
    return x.new_empty((T * K, x.shape[1])).index_copy_(0, places.reshape(-1).long(), x.repeat_interleave(K, 0))


def permute(compiled: bool, inputs: Inputs, _config: None) -> Outputs:
    """Copy rows by index_copy."""
    call = call_compiled if compiled else _called
    return {"y": call(_permute, (inputs["x"], inputs["places"]))}


def permute_fp8(compiled: bool, inputs: Inputs, _config: None) -> Outputs:
    """Index rows, and copy their transpose to aligned columns, whose number waits for no device."""
    call = call_compiled if compiled else _called
    q, q_t = call(_permute_fp8, (inputs["x"], inputs["pairs"], inputs["offs"]), inputs["top_k"])
    return {"q": q, "q_t": q_t.t()}


def _permute_fp8(x: torch.Tensor, pairs: torch.Tensor, offs: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    M = pairs.shape[0]
    q = x[pairs // top_k]
    rows = torch.arange(M, device=x.device)
    group = torch.bucketize(rows, offs, right=True)
    shift = aligned_starts(offs) - torch.cat([offs.new_zeros(1), offs[:-1]])
    spread = x.new_zeros((aligned_size(M, offs.shape[0]), x.shape[1])).index_copy(0, rows + shift[group], q)
    return q, spread.t().contiguous()


def _unpermute(y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    rows = y[places.long()].float()
    return (rows if weights is None else rows * weights[..., None]).sum(1).to(y.dtype)


def _unpermute_alone(y: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return _unpermute(y, places, None)


def unpermute(compiled: bool, inputs: Inputs, _config: None) -> Outputs:
    """Gather the rows of each token and add them."""
    call = call_compiled if compiled else _called
    if inputs["weights"] is None:
        return {"out": call(_unpermute_alone, (inputs["y"], inputs["places"]))}
    return {"out": call(_unpermute, (inputs["y"], inputs["places"], inputs["weights"]))}


def _unpermute_bwd(
    dout: torch.Tensor, y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    T, K = places.shape
    spread = (dout.float()[:, None] * weights[..., None]).to(y.dtype).view(T * K, -1)
    flat = places.reshape(-1).long()
    dy = torch.empty_like(y).index_copy_(0, flat, spread)
    return dy, (y[flat].view(T, K, -1).float() * dout.float()[:, None]).sum(2)


def unpermute_bwd(compiled: bool, inputs: Inputs, _config: None) -> Outputs:
    """Differentiate by index operators."""
    call = call_compiled if compiled else _called
    dy, dweights = call(_unpermute_bwd, tuple(inputs[name] for name in ("dout", "y", "places", "weights")))
    return {"dy": dy, "dweights": dweights}


def _called(function, tensors, *options):
    return function(*tensors, *options)


def not_torch(case: Case) -> str | None:
    """Return why the peers do not take a case."""
    if case.option("routing") == "dropped":
        return "its indices are all of experts"
    return None if case["T"] and case["K"] else "no tokens"
