"""Convert models of transformers: without memory at real sizes, and a tiny model with routed experts, which trains.

With `-m models` a tiny model of every family with routed experts trains.
"""

import re
import warnings
from typing import Any

import pytest
import torch

from kerneltune.nn import convert_to_fp8_training, revert_from_fp8_training

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_experts_per_tok", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_k", "moe_topk", "moe_top_k", "top_k_experts", "router_top_k"), 2),
    **dict.fromkeys((*EXPERT_COUNTS, "num_attention_heads", "num_key_value_heads", "index_n_heads"), 4),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "index_topk"), 16),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("n_group", "topk_group", "num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_layer_interval", "zero_expert_num", "mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "max_seq_len"), 128),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "pad_token_id"), 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MATMUL_OF_ONE_EXPERT = {"aria", "aria_text"}
"""Families whose own loop calls `torch.matmul` with the weights of one expert: the forward pass says so."""

LINEAR_OF_ONE_EXPERT = {"jetmoe", "longcat_flash"}
"""Families whose own loop calls `linear` with the weights of one expert: the conversion sees it in their code."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:  # reading all configs takes seconds
        is_wanted = "models" in metafunc.config.option.markexpr
        metafunc.parametrize("kind", families() if is_wanted else ["deepseek_v3"])


def families() -> list[str]:
    """Return the model types whose default config has experts."""
    transformers = pytest.importorskip("transformers")
    names = []
    for kind, config in transformers.CONFIG_MAPPING.items():
        try:
            text = config().get_text_config()
        except Exception:  # of a config without default sizes, or one that asks the network
            continue
        has_experts = any(isinstance(count := getattr(text, name, None), int) and count > 1 for name in EXPERT_COUNTS)
        if has_experts and type(text) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            names.append(kind)
    return names


def model_of(kind: str) -> torch.nn.Module:
    """Return a tiny model of a family in bf16.

    Skips where its config or model does not take the sizes.
    """
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = transformers.CONFIG_MAPPING[kind]().get_text_config()
        try:
            config = type(text)(**{name: size for name, size in SIZES.items() if hasattr(text, name)})
            model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        except Exception as error:
            pytest.skip(f"{type(error).__name__}: {str(error)[:100]}")
    return model.to(DEVICE)


WITHOUT_MEMORY = (
    "bert clip cohere deepseek_v3 falcon gemma2 gemma3_text glm4 glm4_moe gpt2 gpt_neox gpt_oss granitemoe jamba llama "
    "llama4_text minimax mixtral olmo2 olmoe phi3 phimoe qwen2_moe qwen3_moe qwen3_next roberta stablelm starcoder2 t5 vit "
    "wav2vec2 whisper"
)


@pytest.mark.parametrize("family", WITHOUT_MEMORY.split())
def test_every_module_with_a_matrix_is_converted_or_has_a_reason(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[family]()
    for name in {"num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"} & vars(config).keys():
        setattr(config, name, 2)
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    with torch.device("meta"):
        model = (transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel).from_config(config)
    modules, keys = dict(model.named_modules()), list(model.state_dict())
    types = {name: type(module) for name, module in modules.items()}
    try:
        conversion = convert_to_fp8_training(model, dense=True)
    except ValueError as error:
        assert family in ("falcon", "gpt2", "whisper")  # whose layers are no nn.Linear, and of a config with small layers
        names = re.findall(r"[\w.*]+(?=(?: \(\d+\))?[:,])", str(error).partition("skipped: ")[2])
        named = {name for name in modules if re.sub(r"\.\d+(?=\.|$)", ".*", name) in names}
    else:
        assert list(model.state_dict()) == keys
        assert not conversion.skipped.keys() & set(conversion)
        named = {*conversion, *conversion.skipped}
        assert revert_from_fp8_training(model) == [name for name in modules if name in conversion]
    assert {name: type(module) for name, module in model.named_modules()} == types
    matrices = {name for name, module in modules.items() if any(p.ndim > 1 for p in module.parameters(recurse=False))}
    silent = (torch.nn.Embedding, torch.nn.utils.parametrize.ParametrizationList)
    assert {name for name in matrices - named if not isinstance(modules[name], silent)} == set()


def test_shared_expert_as_wide_as_there_are_experts_holds_no_router() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = torch.nn.ModuleDict({"layer": torch.nn.Linear(4096, 1024)})
            self.shared = torch.nn.ModuleDict({"up": torch.nn.Linear(4096, 1024), "down": torch.nn.Linear(1024, 4096)})
            self.experts = torch.nn.ModuleList([torch.nn.Linear(4096, 16)] * 1024)

    with torch.device("meta"):
        conversion = convert_to_fp8_training(Layer(), dense=True)
    assert conversion == ["shared.up", "shared.down"]
    assert conversion.skipped["router.layer"] == "a router, which chooses among 1024 experts"


def gradients(model: torch.nn.Module) -> torch.Tensor:
    """Return the gradients of all expert weights for fixed tokens, as a vector."""
    model.zero_grad()
    torch.manual_seed(1)
    tokens = torch.randint(3, 100, (1, 12), device=DEVICE)
    out = model(input_ids=tokens, use_cache=False).logits
    (out.float() * torch.randn(out.shape, device=DEVICE)).mean().backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.ndim == 3 and p.grad is not None])


@pytest.mark.models
def test_model_family_trains_in_fp8_or_is_refused_with_the_module(kind: str) -> None:
    model = model_of(kind)
    try:
        expected = gradients(model)
    except Exception as error:
        pytest.skip(f"does not run at these sizes: {type(error).__name__}: {str(error)[:100]}")
    if not any(p.ndim == 3 and p.shape[0] == 4 and min(p.shape[1:]) >= 16 for p in model.parameters()):
        with pytest.raises(ValueError, match="has no expert weights"):
            convert_to_fp8_training(model)
        return
    if kind in LINEAR_OF_ONE_EXPERT:
        with pytest.raises(ValueError, match=r"\.(experts|mlp|moe)[^;]* makes no grouped or batched product"):
            convert_to_fp8_training(model)
        return
    assert convert_to_fp8_training(model)
    if kind in MATMUL_OF_ONE_EXPERT:
        with pytest.raises(
            ValueError, match=r"\.(experts|mlp).* was converted, but its forward pass makes no grouped or batched"
        ):
            gradients(model)
        return
    got = gradients(model)
    assert torch.cosine_similarity(got, expected, dim=0) > 0.95
    assert abs(float(got @ expected / (expected @ expected)) - 1) < 0.04
    assert revert_from_fp8_training(model)
    assert torch.equal(gradients(model), expected)
