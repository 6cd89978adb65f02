"""Make calls of a program: by a function of the user, or for functions with the arguments of a fused expert layer."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kerneltune.adopt.arguments import torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

    from kerneltune.workloads.model_config import Model

EXPERTS = ("hidden_states", "w1", "w2", "topk_weights", "topk_ids")
"""Arguments of vLLM's expert layers. A function that takes them is called with tensors that are made here."""
SIZES = ("tokens", "experts", "hidden", "inner", "top_k")
ALL_EXPERTS = "all_experts"
_SPREAD = 0.5
"""Deviation of the log of an expert's popularity: the busiest of 128 experts has about three times the mean."""


def make_call(made: Callable[..., Any], sizes: Mapping[str, int], dtype: str, device: str, seed: int) -> Callable[[], Any]:
    """Return a function without arguments that calls the program at some sizes.

    Args:
        made: the call itself, if it has the arguments of an expert layer. Otherwise it takes the sizes, `dtype`, `device` and
            `seed` that it names, and returns a function without arguments.

    Raises:
        ValueError: a size is missing, or the function returns something else.
    """
    parameters = inspect.signature(made).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    other = [name for name in sizes if name not in (*parameters, *SIZES, ALL_EXPERTS)]
    if other and not takes_any:
        raise ValueError(f"call: size {other[0]}: the function takes none: expected one of {', '.join(parameters)}")
    if set(EXPERTS) <= set(parameters):
        return partial(made, **_expert_arguments(set(parameters), sizes, dtype, device, seed))
    given = {**sizes, "dtype": torch_dtype(dtype), "device": device, "seed": seed}
    for name, one in parameters.items():
        if name not in given and one.default is one.empty:
            raise ValueError(f"call: argument {name}: missing: give --size {name}=VALUE")
    function = made(**{name: given[name] for name in parameters if name in given})
    if not callable(function):
        raise ValueError(f"call: returned {type(function).__name__}: expected a function without arguments, such as a partial")
    call: Callable[[], Any] = function
    return call


def tensors_of(call: Callable[[], Any]) -> "dict[str, Tensor]":
    """Return the tensors among the arguments of a partial, by name or place."""
    if not isinstance(call, partial):
        return {}
    named = {**{f"argument {place}": value for place, value in enumerate(call.args)}, **call.keywords}
    return {name: value for name, value in named.items() if hasattr(value, "untyped_storage")}


def _expert_arguments(names: set[str], sizes: Mapping[str, int], dtype: str, device: str, seed: int) -> dict[str, Any]:
    """Return activations, weights, and a routing to experts of different popularity, as trained routers have."""
    import torch

    if lacking := [name for name in SIZES if name not in sizes]:
        raise ValueError(f"call: size {lacking[0]}: missing: give --model FILE or --size {lacking[0]}=VALUE")
    tokens, experts, hidden, inner, top_k = (sizes[name] for name in SIZES)
    everywhere = sizes.get(ALL_EXPERTS, experts)
    made: dict[str, Any] = {
        "device": device,
        "generator": None if device == "meta" else torch.Generator(device).manual_seed(seed),
    }
    normal, kind = partial(torch.randn, **made), torch_dtype(dtype)
    chance = torch.rand(tokens, everywhere, **made).clamp(1e-9, 1 - 1e-7)
    drawn = _SPREAD * normal(everywhere) - (-chance.log()).log()  # the largest are draws without replacement
    scores, ids = drawn.topk(top_k)
    arguments = {
        "hidden_states": normal(tokens, hidden, dtype=kind),
        "w1": normal(experts, 2 * inner, hidden, dtype=kind).mul_(hidden**-0.5),
        "w2": normal(experts, hidden, inner, dtype=kind).mul_(inner**-0.5),
        "topk_weights": scores.softmax(-1),
        "topk_ids": ids.to(torch.int32),
    }
    if everywhere == experts:
        return arguments
    if not {"expert_map", "global_num_experts"} <= names:
        raise ValueError("call: --ep: the function takes no expert_map: give a function that makes the call")
    owned = torch.arange(everywhere, dtype=torch.int32, device=device)
    return arguments | {"global_num_experts": everywhere, "expert_map": torch.where(owned < experts, owned, -1)}


def expert_sizes(model: "Model", tp: int, ep: int) -> dict[str, int]:
    """Return the sizes of a model's expert layer on one GPU, without the tokens."""
    experts = model.experts
    if experts is None:
        raise ValueError(f"{model.path}: experts: none: expected a model with experts")
    for name, size, option, parts in (
        (experts.count_field, experts.count, "ep", ep),
        (experts.width_field, experts.width, "tp", tp),
    ):
        if size % parts:
            raise ValueError(f"{model.path}: {name}: {size}: expected a multiple of {option}={parts}")
    sizes = {"experts": experts.count // ep, "hidden": model.hidden, "inner": experts.width // tp, "top_k": experts.top_k}
    return sizes | ({ALL_EXPERTS: experts.count} if ep > 1 else {})
