"""Make the arguments of the expert layers of vLLM and SGLang, also with weights of fp8."""

import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

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
_DTYPES = (FP8, "fp8_w8a16", "int8_w8a8", "int8_w8a16", "int4_w4a16", "float32")
_NAMED = re.compile(r"(?:dtype=(\w+)(?:,block_shape=\[([1-9]\d*), ?([1-9]\d*)\]|,per_channel_quant=(True))?)?")
_SPREAD = 0.5
"""Deviation of the log of an expert's popularity: the busiest of 128 experts has about three times the mean."""
_DEVIATION = 32
"""Deviation of fp8 weights: the largest, 448, is 14 times as large."""


class Weights(msgspec.Struct, frozen=True, omit_defaults=True):
    """Say how weights are quantized: the fields of a table's name beside the sizes and the GPU, by `msgspec.to_builtins`.

    Attributes:
        dtype: the engines' name of the element types; empty for weights that are not quantized.
        block_shape: rows and columns of a block with a scale of its own; empty without blocks.
        per_channel_quant: whether each row has a scale of its own.
    """

    dtype: str = ""
    block_shape: list[int] = []
    per_channel_quant: bool = False

    @property
    def is_fp8(self) -> bool:
        """Return whether weights and activations are multiplied in e4m3."""
        return self.dtype == FP8


def named_weights(text: str) -> Weights:
    """Return the weights of `--named`, for example of `dtype=fp8_w8a8,block_shape=[128,128]`."""
    if not (found := _NAMED.fullmatch(text)):
        form = "dtype=NAME alone, with block_shape=[ROWS,COLUMNS] of 1 or more, or with per_channel_quant=True"
        raise ValueError(f"named: {text!r}: expected {form}, such as dtype={FP8},block_shape=[128,128]")
    dtype, rows, columns, is_per_channel = found.groups()
    if dtype and dtype not in _DTYPES:
        raise unknown("named: dtype", dtype, _DTYPES)
    return Weights(dtype or "", [int(rows), int(columns)] if rows else [], bool(is_per_channel))


def arguments(
    names: Collection[str], sizes: Mapping[str, int], quantized: Weights, dtype: str, device: str, seed: int
) -> dict[str, Any]:
    """Return activations, weights, and a routing to experts of different popularity, as trained routers have.

    Args:
        names: arguments that the function takes.
        quantized: how weights are quantized.
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
        **(_in_fp8(weights, names, quantized, options) if quantized.dtype else weights),
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
    weights: "Mapping[str, Tensor]", names: Collection[str], quantized: Weights, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return weights in e4m3 with float32 scales: one for each expert (E,), row (E, N, 1) or block (E, N / block, K / block)."""
    import torch

    if not quantized.is_fp8:
        raise ValueError(f"named: dtype={quantized.dtype}: expected {FP8}: else give a function that makes the call")
    made = {"use_fp8_w8a8": True, **{name: value for name, value in msgspec.to_builtins(quantized).items() if name != "dtype"}}
    for name, weight in weights.items():
        experts, rows, columns = weight.shape
        block_rows, block_columns = quantized.block_shape or (1, columns)
        of_parts = (experts, -(-rows // block_rows), -(-columns // block_columns))
        scales = torch.rand(of_parts if quantized.block_shape or quantized.per_channel_quant else (experts,), **options)
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
