"""The tensors with which the engines' expert layers are called."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from test_getter import spec_of

from kerneltune.adopt.expert_layer import expert_sizes, named_weights
from kerneltune.adopt.getter import make_call
from kerneltune.workloads.model_config import read

MODEL = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "head_dim": 128, "intermediate_size": 6144,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "rms_norm_eps": 1e-6,
}  # fmt: skip


def test_expert_sizes_of_a_model_are_those_of_one_gpu(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    assert expert_sizes(read(path), 2, 1) == {"experts": 128, "hidden": 2048, "inner": 384, "top_k": 8}
    assert expert_sizes(read(path), 1, 4) == {"experts": 32, "hidden": 2048, "inner": 768, "top_k": 8, "all_experts": 128}
    with pytest.raises(ValueError, match=r"config.json: moe_intermediate_size: 768: expected a multiple of tp=5$"):
        expert_sizes(read(path), 5, 1)


def test_routing_of_calls_is_skewed_and_has_the_experts_of_the_rank() -> None:
    def experts(
        hidden_states: Any,
        w1: Any,
        w2: Any,
        topk_weights: Any,
        topk_ids: Any,
        expert_map: Any = None,
        global_num_experts: int = -1,
    ) -> Mapping[str, Any]:
        return {"ids": topk_ids, "map": expert_map, "all": global_num_experts}

    sizes = {"tokens": 4096, "experts": 32, "hidden": 8, "inner": 8, "top_k": 8}
    counts = torch.bincount(make_call(spec_of("bfloat16"), experts, sizes, "cpu", 0)()["ids"].flatten(), minlength=32)
    assert counts.sum() == 8 * 4096
    assert counts.max() > 1.5 * counts.float().mean() > 0
    ids = make_call(spec_of("bfloat16"), experts, sizes, "cpu", 0)()["ids"]
    assert all(len(set(row)) == 8 for row in ids[:64].tolist())
    result: Any = make_call(spec_of("bfloat16"), experts, {**sizes, "all_experts": 128}, "cpu", 0)()
    assert result["all"] == 128
    assert result["map"].tolist() == [*range(32), *[-1] * 96]
    assert int(result["ids"].max()) > 100


def in_fp8(
    hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, use_fp8_w8a8: bool = False, w1_scale: Any = None,
    w2_scale: Any = None, block_shape: Any = None, per_channel_quant: bool = False,
) -> Mapping[str, Any]:  # fmt: skip
    """Take the arguments of the engines' `fused_experts_impl`."""
    scales = {"w1": (w1, w1_scale), "w2": (w2, w2_scale)}
    return {**scales, "x": hidden_states, "flags": (use_fp8_w8a8, block_shape, per_channel_quant)}


@pytest.mark.parametrize(
    ("named", "w1_parts", "w2_parts", "flags"),
    [
        ("dtype=fp8_w8a8", (), (), (True, None, False)),
        ("dtype=fp8_w8a8,per_channel_quant=True", (48, 1), (40, 1), (True, None, True)),
        ("dtype=fp8_w8a8,block_shape=[16,32]", (3, 2), (3, 1), (True, [16, 32], False)),
    ],
)
def test_expert_layer_in_fp8_is_given_weights_with_scales(
    named: str, w1_parts: tuple[int, ...], w2_parts: tuple[int, ...], flags: tuple[object, ...]
) -> None:
    sizes = {"tokens": 4, "experts": 3, "hidden": 40, "inner": 24, "top_k": 2}
    made: Any = make_call(spec_of("bfloat16", named), in_fp8, sizes, "cpu")()
    assert (made["x"].dtype, made["flags"]) == (torch.bfloat16, flags)
    for name, parts in (("w1", w1_parts), ("w2", w2_parts)):
        weight, scale = made[name]
        assert (weight.dtype, scale.dtype, tuple(scale.shape)) == (torch.float8_e4m3fn, torch.float32, (3, *parts))
        assert 0.5 < float(weight.float().std() * scale.mean() * weight.shape[2] ** 0.5) < 2
        assert weight.float().isfinite().all()
        assert len(scale.unique()) == scale.numel()


@pytest.mark.parametrize(
    ("named", "call", "message"),
    [
        ("dtype=int8_w8a16", in_fp8, "named: dtype=int8_w8a16: expected fp8_w8a8: else give a function that makes the call"),
        (
            "dtype=fp8_w8a8",
            lambda hidden_states, w1, w2, topk_weights, topk_ids: None,
            "named: dtype=fp8_w8a8: the call takes no use_fp8_w8a8: give a function that makes the call",
        ),
    ],
)
def test_expert_layer_with_a_quantization_that_its_call_does_not_take_raises(
    named: str, call: Callable[..., Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_call(spec_of("bfloat16", named), call, {"tokens": 1, "experts": 2, "hidden": 8, "inner": 8, "top_k": 1}, "cpu")


@pytest.mark.parametrize(
    "named",
    [
        "fp8", "dtyp=x", "dtype=", "block_shape=[128,128]", "dtype=fp8_w8a8,block_shape=128", "dtype=fp8_w8a8,block_shape=[128]",
        "dtype=fp8_w8a8,block_shape=[128,0]", "dtype=fp8_w8a8,per_channel_quant=maybe", "dtype=fp8_w8a8,dtype=fp8_w8a8",
        "dtype=fp8_w8a8,block_shape=[128,128],per_channel_quant=True",
    ],
)  # fmt: skip
def test_named_weights_of_another_form_raise(named: str) -> None:
    with pytest.raises(ValueError, match=rf"^named: {re.escape(repr(named))}: expected dtype=NAME alone, with block_shape=\["):
        named_weights(named)


def test_named_weights_of_an_unknown_type_raise() -> None:
    with pytest.raises(ValueError, match=r"^named: dtype: 'fp8_w8a9': did you mean fp8_w8a8\? expected one of fp8_w8a8, "):
        named_weights("dtype=fp8_w8a9,block_shape=[128,128]")
