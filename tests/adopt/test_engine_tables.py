"""Tables of tuned calls in the forms and under the names that engines look up."""

import json

import pytest

from kerneltune import device
from kerneltune.adopt.expert_layer import Weights, named_weights
from kerneltune.adopt.getter import CallCase
from kerneltune.adopt.getter_tuning import ENGINE_TOKENS, TunedCall, engine_tables


def tuned(tokens: int, **sizes: int) -> TunedCall:
    return TunedCall(
        CallCase({"tokens": tokens, "experts": 8, "hidden": 64, "inner": 7168, "top_k": 2, **sizes}), {"BLOCK": tokens}
    )


@pytest.mark.parametrize(
    ("engine", "gpu", "named", "path"),
    [
        ("vllm", "NVIDIA GeForce RTX 4090", "", "E=8,N=7168,device_name=NVIDIA_GeForce_RTX_4090.json"),
        ("vllm", "NVIDIA H200 NVL", "", "E=8,N=7168,device_name=NVIDIA_H200.json"),
        ("vllm", "NVIDIA L40S / MIG 1g", "", "E=8,N=7168,device_name=NVIDIA_L40S_MIG_1g.json"),
        (
            "vllm", "NVIDIA A100-SXM4-80GB", "dtype=fp8_w8a8,block_shape=[128, 128]",
            "E=8,N=7168,device_name=NVIDIA_A100-SXM4-80GB,dtype=fp8_w8a8,block_shape=[128,128].json",
        ),
        (
            "sglang", "NVIDIA H200", "dtype=fp8_w8a8,block_shape=[128,128]",
            "configs/triton_VERSION/E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128].json",
        ),
        (
            "sglang", "NVIDIA H200", "dtype=fp8_w8a8,per_channel_quant=True",
            "configs/triton_VERSION/E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8,per_channel_quant=True.json",
        ),
        (
            "vllm", "NVIDIA H200", "dtype=fp8_w8a8,per_channel_quant=True",
            "E=8,N=7168,device_name=NVIDIA_H200,dtype=fp8_w8a8.json",
        ),
        ("sglang", "AMD Instinct MI300X", "", "configs/triton_VERSION/E=8,N=7168,device_name=AMD_Instinct_MI300X.json"),
    ],
)  # fmt: skip
def test_engine_tables_have_the_paths_that_engines_look_up(engine: str, gpu: str, named: str, path: str) -> None:
    tables = engine_tables(engine, gpu, [tuned(16), tuned(1)], named_weights(named))
    assert list(tables) == [path.replace("VERSION", device.versions()["triton"].replace(".", "_"))]
    assert list(json.loads(next(iter(tables.values())))) == ["1", "16"]


@pytest.mark.parametrize(
    ("engine", "path"),
    [
        ("vllm", "N=7168,K=2048,device_name=NVIDIA_H200_NVL,dtype=fp8_w8a8,block_shape=[128,128].json"),
        ("sglang", "N=7168,K=2048,device_name=NVIDIA_H200_NVL,dtype=fp8_w8a8,block_shape=[128, 128].json"),
    ],
)
def test_tables_of_a_linear_layer_are_named_by_rows_and_columns_of_its_weight(engine: str, path: str) -> None:
    calls = [TunedCall(CallCase({"tokens": tokens, "N": 7168, "K": 2048}), {"BLOCK": tokens}) for tokens in (1, 16)]
    tables = engine_tables(engine, "NVIDIA H200 NVL", calls, named_weights("dtype=fp8_w8a8,block_shape=[128,128]"))
    assert {name: list(json.loads(text)) for name, text in tables.items()} == {path: ["1", "16"]}


def test_engine_table_without_an_own_config_of_a_key_raises() -> None:
    lacking = TunedCall(CallCase({"tokens": 2, "experts": 8, "inner": 64}, problem="never asks the getter"), {})
    with pytest.raises(ValueError, match=r"^export: vllm: 2 tokens: never asks the getter$"):
        engine_tables("vllm", "NVIDIA H200", [lacking], Weights())
    with pytest.raises(ValueError, match=r"^export: sglang: size inner: missing$"):
        engine_tables("sglang", "NVIDIA H200", [TunedCall(CallCase({"tokens": 2, "experts": 8}), {"BLOCK": 1})], Weights())


def test_engine_table_of_a_linear_layer_without_blocks_raises() -> None:
    call = TunedCall(CallCase({"tokens": 1, "N": 7168, "K": 2048}), {"BLOCK": 1})
    with pytest.raises(ValueError, match=r"^export: vllm: named: block_shape: missing: "):
        engine_tables("vllm", "NVIDIA H200", [call], named_weights("dtype=fp8_w8a8"))


def test_engine_tokens_are_sorted_and_distinct() -> None:
    assert list(ENGINE_TOKENS) == sorted(set(ENGINE_TOKENS))
    assert (len(ENGINE_TOKENS), ENGINE_TOKENS[-1]) == (18, 4096)
