"""The look-up functions of installed vLLM and SGLang find the config of every key in exported tables.

The engines need no dependencies for this: `pip install --no-deps vllm sglang`, or their unpacked wheels on PYTHONPATH.
"""

import __future__

import ast
import functools
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from kerneltune.adopt.expert_layer import named_weights
from kerneltune.adopt.getter import CallCase
from kerneltune.adopt.getter_tuning import ENGINE_TOKENS, TunedCall, engine_tables

EXPERTS, HIDDEN, INNER = 8, 64, 7168
MODULES = {
    "vllm": ("model_executor/layers/fused_moe/fused_moe.py", "vllm.model_executor.layers.fused_moe"),
    "sglang": (
        "srt/layers/moe/moe_runner/triton_utils/fused_moe_triton_config.py",
        "sglang.srt.layers.moe.moe_runner.triton_utils",
    ),
}
"""Name, by engine, the module with the look-up below the engine's folder, and the package of its override."""
LINEAR = {
    "vllm": "model_executor/layers/quantization/utils/fp8_utils.py",
    "sglang": "kernels/ops/gemm/fp8_kernel.py",
}
"""Name, by engine, the module with the look-up of linear layers."""


def source_of(engine: str, module: str) -> str:
    """Return the source of the engine's look-up; skip the test without the engine."""
    found = importlib.util.find_spec(engine)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"needs the files of {engine}: pip install --no-deps {engine}")
    return (Path(next(iter(found.submodule_search_locations))) / module).read_text()


def functions_of(source: str, names: Sequence[str], namespace: dict[str, Any]) -> Callable[..., Any]:
    """Define the functions of the look-up in a namespace that stands for the engine's modules, and return the last."""
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert sorted(function.name for function in functions) == sorted(names)
    code = compile(ast.Module(functions, []), "look-up", "exec", flags=__future__.annotations.compiler_flag)
    exec(code, namespace)
    look_up: Callable[..., Any] = namespace[names[-1]]
    return look_up


def no_table(*_: object) -> None:
    raise AssertionError("the engine takes its default")


@pytest.fixture
def look_up(engine: str, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return the engine's look-up of a config in the folder `tmp_path`; the GPU's file name is ours, made as in vLLM 0.33.0."""
    source = source_of(engine, MODULES[engine][0])
    override = ModuleType(MODULES[engine][1])
    override.__dict__["get_config"] = lambda: None
    monkeypatch.setitem(sys.modules, override.__name__, override)
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    logger = logging.getLogger("engine")
    for name in ("info_once", "warning_once"):
        monkeypatch.setattr(logger, name, lambda *_, **__: None, raising=False)
    exact = SimpleNamespace(enable_deterministic_inference=False)
    namespace = {
        "__file__": str(tmp_path / "elsewhere" / "module.py"),
        "functools": functools, "json": json, "os": os, "triton": triton, "logger": logger, "get_default_config": no_table,
        "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=False, VLLM_TUNED_CONFIG_FOLDER=str(tmp_path)),
        "get_device_name_as_file_name": lambda: re.sub(r"[\s/]+", "_", gpu),
        "get_device_name": lambda: gpu, "get_exec": lambda: SimpleNamespace(deterministic=exact),
    }  # fmt: skip
    return functions_of(source, ("get_config_file_name", "get_moe_configs", "try_get_optimal_moe_config"), namespace)


def exported(engine: str, gpu: str, named: str, folder: Path, **sizes: int) -> Mapping[int, Mapping[str, int]]:
    """Export a table whose configs differ, and return it by tokens."""
    configs = {tokens: {"BLOCK_SIZE_M": 16 + tokens, "BLOCK_SIZE_K": 64, "num_warps": 4} for tokens in ENGINE_TOKENS}
    calls = [TunedCall(CallCase({"tokens": tokens, **sizes}), config) for tokens, config in configs.items()]
    for path, text in engine_tables(engine, gpu, calls, named_weights(named)).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return configs


@pytest.mark.parametrize("engine", MODULES)
@pytest.mark.parametrize(
    "gpu", ["NVIDIA H200", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-80GB", "NVIDIA RTX PRO 6000 Blackwell / MIG"]
)
@pytest.mark.parametrize(("named", "dtype", "block_shape"), [
    ("", None, None), ("dtype=fp8_w8a8", "fp8_w8a8", None), ("dtype=fp8_w8a8,per_channel_quant=True", "fp8_w8a8", None),
    ("dtype=fp8_w8a8,block_shape=[128,128]", "fp8_w8a8", [128, 128]),
])  # fmt: skip
def test_engine_finds_the_config_of_every_key(
    engine: str,
    gpu: str,
    named: str,
    dtype: str | None,
    block_shape: list[int] | None,
    tmp_path: Path,
    look_up: Callable[..., Any],
) -> None:
    configs = exported(engine, gpu, named, tmp_path, experts=EXPERTS, hidden=HIDDEN, inner=INNER, top_k=2)
    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
    options: dict[str, Any] = {"block_shape": block_shape}
    if engine == "sglang":
        options["per_channel_quant"] = "per_channel_quant" in named
    for tokens, config in configs.items():
        assert look_up(*shapes, 2, dtype, tokens, **options) == config
    assert look_up(*shapes, 2, dtype, 3000, **options) == configs[3072]
    with pytest.raises(AssertionError, match="the engine takes its default"):
        look_up((4, 2 * INNER, HIDDEN), (4, HIDDEN, INNER), 2, dtype, 1, **options)


@pytest.mark.parametrize("engine", LINEAR)
@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H200 NVL"])
def test_engine_finds_the_table_of_a_linear_layer(engine: str, gpu: str, tmp_path: Path) -> None:
    namespace = {
        "__file__": str(tmp_path / "module.py"), "functools": functools, "json": json, "os": os, "torch": torch, "_is_cuda": True,
        "logger": logging.getLogger("engine"), "log_info_on_rank0": lambda *_: None,
        "get_device_name_as_file_name": lambda: gpu.replace(" ", "_"), "get_device_name": lambda: gpu,
    }  # fmt: skip
    look_up = functions_of(source_of(engine, LINEAR[engine]), ["get_w8a8_block_fp8_configs"], namespace)
    configs = exported(engine, gpu, "dtype=fp8_w8a8,block_shape=[128,128]", tmp_path / "configs", N=7168, K=2048)
    assert look_up(7168, 2048, 128, 128) == configs
    assert look_up(2048, 7168, 128, 128) is None
