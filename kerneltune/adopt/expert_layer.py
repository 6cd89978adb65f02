"""Make the arguments of the expert layers of vLLM and SGLang, also with weights of fp8."""

import json
import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from kerneltune.adopt.arguments import torch_dtype
from kerneltune.errors import unknown

if TYPE_CHECKING:
    from torch import Tensor

    from kerneltune.workloads.model_config import Model

ARGUMENTS = ("hidden_states", "w1", "w2", "topk_weights", "topk_ids")
"""Arguments of an expert layer. A function that takes them is called with tensors that are made here."""
SIZES = ("tokens", "experts", "hidden", "inner", "top_k")
ALL_EXPERTS = "all_experts"
FP8 = "fp8_w8a8"
"""The engines' name of weights of e4m3 whose layer casts activations to e4m3."""
FIELDS = ("dtype", "block_shape", "per_channel_quant")
"""Fields of the names of tables, beside the sizes and the GPU."""
_SPREAD = 0.5
"""Deviation of the log of an expert's popularity: the busiest of 128 experts has about three times the mean."""
_DEVIATION = 32
"""Deviation of fp8 weights: the largest, 448, is 14 times as large."""


def name_fields(named: str) -> dict[str, Any]:
    """Return the fields of a table's name by name, for example of `dtype=fp8_w8a8,block_shape=[128,128]`."""
    if not re.fullmatch(r"(\w+=(\w+|\[\d+, ?\d+\])(,(?=\w)|$))*", named):
        raise ValueError(f"named: {named!r}: expected fields such as dtype={FP8},block_shape=[128,128]")
    fields = dict(re.findall(r"(\w+)=(\w+|\[.*?\])", named))
    if other := fields.keys() - set(FIELDS):
        raise unknown("named", min(other), FIELDS)
    return {name: json.loads(text) if text.startswith("[") else text for name, text in fields.items()}


def arguments(
    names: Collection[str], sizes: Mapping[str, int], fields: Mapping[str, Any], dtype: str, device: str, seed: int
) -> dict[str, Any]:
    """Return activations, weights, and a routing to experts of different popularity, as trained routers have.

    Args:
        names: arguments that the function takes.
        fields: fields of the table's name, which say how weights are quantized.
    """
    import torch

    if lacking := [name for name in SIZES if name not in sizes]:
        raise ValueError(f"call: size {lacking[0]}: missing: give --model FILE or --size {lacking[0]}=VALUE")
    tokens, experts, hidden, inner, top_k = (sizes[name] for name in SIZES)
    everywhere = sizes.get(ALL_EXPERTS, experts)
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)
    options: dict[str, Any] = {"device": device, "generator": generator}
    normal, kind = partial(torch.randn, **options), torch_dtype(dtype)
    chance = torch.rand(tokens, everywhere, **options).clamp(1e-9, 1 - 1e-7)
    drawn = _SPREAD * normal(everywhere) - (-chance.log()).log()  # the largest are draws without replacement
    scores, ids = drawn.topk(top_k)
    weights = {
        "w1": normal(experts, 2 * inner, hidden, dtype=kind).mul_(hidden**-0.5),
        "w2": normal(experts, hidden, inner, dtype=kind).mul_(inner**-0.5),
    }
    made = {
        "hidden_states": normal(tokens, hidden, dtype=kind),
        **(_in_fp8(weights, names, fields, options) if "dtype" in fields else weights),
        "topk_weights": scores.softmax(-1),
        "topk_ids": ids.to(torch.int32),
    }
    if everywhere == experts:
        return made
    if not {"expert_map", "global_num_experts"} <= set(names):
        raise ValueError("call: --ep: the function takes no expert_map: give a function that makes the call")
    owned = torch.arange(everywhere, dtype=torch.int32, device=device)
    return made | {"global_num_experts": everywhere, "expert_map": torch.where(owned < experts, owned, -1)}


def _in_fp8(
    weights: "Mapping[str, Tensor]", names: Collection[str], fields: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return weights in e4m3 with float32 scales: one for each expert (E,), row (E, N, 1) or block (E, N / block, K / block)."""
    import torch

    if fields["dtype"] != FP8:
        raise ValueError(f"named: dtype={fields['dtype']}: expected {FP8}: else give a function that makes the call")
    made: dict[str, Any] = {"use_fp8_w8a8": True} | {name: value for name, value in fields.items() if name == "block_shape"}
    made |= {"per_channel_quant": True} if fields.get("per_channel_quant") == "True" else {}
    for name, weight in weights.items():
        experts, rows, columns = weight.shape
        block_rows, block_columns = fields.get("block_shape", (1, columns))
        of_parts = (experts, -(-rows // block_rows), -(-columns // block_columns))
        scales = torch.rand(of_parts if made.keys() & {"block_shape", "per_channel_quant"} else (experts,), **options)
        deviation = columns**-0.5  # of the weight
        made[name] = weight.mul_(_DEVIATION / deviation).to(torch.float8_e4m3fn)
        made[f"{name}_scale"] = scales.add_(0.5).mul_(deviation / _DEVIATION)
    if lacking := [name for name in made if name not in names]:
        raise ValueError(f"named: dtype={FP8}: the call takes no {lacking[0]}: give a function that makes the call")
    return made


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
