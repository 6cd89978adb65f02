"""Compare the cases of a family of transformers with the layers of its model, on the meta device; of all with `-m models`."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from kerneltune import ops, sweep_file
from kerneltune.workloads.model_cases import model_sweep_text
from kerneltune.workloads.model_config import read

NOT_BUILT = {"bamba", "granitemoehybrid"}
"""Families whose default config has no layer with attention."""

OTHER_PARTS = {
    "axk2", "deepseek_v32", "deepseek_v4", "fuyu", "gemma3", "gemma3n_text", "gemma4", "gemma4_text", "glm_moe_dsa", "got_ocr2",
    "hy_v4", "longcat_flash", "minimax", "phi4_multimodal", "zamba", "zaya",
}  # fmt: skip
"""Families with parts that no other has, or that are of no text model: pictures, indexers, routers of several layers."""

WIDE = 256
"""Outputs of a linear layer beyond which it is no router or gate."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:  # reading all configs takes seconds
        metafunc.parametrize("kind", families() if "models" in metafunc.config.option.markexpr else ["qwen3_moe"])


def families() -> list[str]:
    """Return the model types of language models whose class has default sizes."""
    transformers = pytest.importorskip("transformers")
    kinds = []
    for kind, config in transformers.CONFIG_MAPPING.items():
        try:
            is_written = type(config()) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        except Exception:  # of a config without default sizes, or one that asks the network
            continue
        kinds += [kind] if is_written else []
    return kinds


def layers_of(config: Any) -> torch.nn.Module:
    """Return the model of a config without values; skip where transformers cannot build it of its own defaults."""
    transformers = pytest.importorskip("transformers")
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers cannot build every family of its own defaults
        pytest.skip(f"{type(error).__name__}: {str(error)[:100]}")
    return model


@pytest.mark.models
def test_projections_of_a_family_equal_parameters_of_its_model(kind: str, tmp_path: Path) -> None:
    """(outputs, inputs) of every product are a parameter's; every wide linear layer has a product."""
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[kind]()
    config.to_json_file(tmp_path / "config.json")
    try:
        read_as = read(tmp_path / "config.json")
        text = model_sweep_text(read_as, [4096], [1])
    except ValueError as error:
        pytest.skip(str(error).partition(": ")[2][:150])
    (tmp_path / "made.yaml").write_text(text)
    cases = [(entry.op, dict(entry.case.axes)) for entry in sweep_file.load(tmp_path / "made.yaml", ops.load()).bench]
    dense = {(axes["M"], axes["K"]) for op, axes in cases if op == "int4_gemm"}
    routed = {(axes["N"], axes["K"]) for op, axes in cases if op == "fp8_grouped_gemm"}
    model = layers_of(config)
    shapes = {frozenset(weight.shape[-2:]) for weight in model.parameters() if weight.ndim > 1}
    shapes |= {frozenset((2 * weight.shape[0], weight.shape[1])) for weight in model.parameters() if weight.ndim == 2}  # gate, up
    if kind not in NOT_BUILT | OTHER_PARTS:
        assert not {shape for shape in dense | routed if frozenset(shape) not in shapes}
    if kind not in OTHER_PARTS and not read_as.has_recurrence:
        shapes_of = {frozenset(shape) for shape in dense | routed} | {frozenset((2 * out, depth)) for out, depth in dense}
        wide = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m.out_features > WIDE}
        heads = {name: m for name, m in wide.items() if m.out_features == config.get_text_config().vocab_size}
        assert not {name: m for name, m in wide.items() if name not in heads and frozenset(m.weight.shape) not in shapes_of}
