"""Build models of `transformers` at real layer sizes with few layers, and run whole training steps of them. May import nn."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kerneltune.compat import apply_gate
from kerneltune.nn.alignment import aligned_groups
from kerneltune.nn.fp8_linear import why_not_fp8

SEQUENCE = 4096
"""Tokens of a sequence."""
_VOCABULARY = 16384
"""Smaller than the models' own, about as the number of layers is: output layer and loss keep their share of a step."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Hold the sizes of a model.

    Attributes:
        model_type: model type of `transformers.AutoConfig`.
        tokens: tokens of a step on one GPU.
        sizes: settings of the config.
    """

    model_type: str
    tokens: int
    sizes: dict[str, Any]


_DEEPSEEK = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True,
}  # fmt: skip

SHAPES = {
    "deepseek-v3-16b": ModelShape("deepseek_v3", 32768, _DEEPSEEK | {
        "vocab_size": _VOCABULARY, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 5, "first_k_dense_replace": 1, "num_attention_heads": 16, "num_key_value_heads": 16,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "q_lora_rank": None,
    }),
    "deepseek-v3-671b": ModelShape("deepseek_v3", 8192, _DEEPSEEK | {
        "vocab_size": _VOCABULARY, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 2, "first_k_dense_replace": 0, "num_attention_heads": 128, "num_key_value_heads": 128,
        "n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 8, "q_lora_rank": 1536,
    }),
    "qwen3-30b-a3b": ModelShape("qwen3_moe", 32768, {
        "vocab_size": _VOCABULARY, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "output_router_logits": False,
    }),
    "llama-3-8b": ModelShape("llama", 16384, {
        "vocab_size": _VOCABULARY, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
    }),
    "tiny-experts": ModelShape("qwen3_moe", 40, {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "output_router_logits": False,
    }),
}  # fmt: skip


def num_parameters(name: str) -> int:
    """Estimate the number of parameters of a model."""
    sizes = SHAPES[name].sizes
    hidden, layers = sizes["hidden_size"], sizes["num_hidden_layers"]
    num_dense = sizes.get("first_k_dense_replace", 0) if "moe_intermediate_size" in sizes else layers
    experts = sizes.get("n_routed_experts", sizes.get("num_experts", 0)) + sizes.get("n_shared_experts", 0)
    feed_forward = num_dense * sizes["intermediate_size"] + (layers - num_dense) * experts * sizes.get("moe_intermediate_size", 0)
    count: int = hidden * (3 * feed_forward + 4 * layers * hidden + 2 * sizes["vocab_size"])
    return count


def build(name: str, device: str) -> nn.Module:
    """Return a model of `SHAPES` with random bf16 weights, its experts multiplied by `torch._grouped_mm`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = SHAPES[name]
    settings = {"max_position_embeddings": SEQUENCE, "use_cache": False, "tie_word_embeddings": False}
    config = AutoConfig.for_model(shape.model_type, **settings | shape.sizes)
    torch.manual_seed(0)
    with torch.device(device):
        from_config: Any = AutoModelForCausalLM.from_config
        model: Any = from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if has_experts(model):
        model.set_experts_implementation("grouped_mm")
    built: nn.Module = model.train()
    return built


def has_experts(model: nn.Module) -> bool:
    """Return whether a model of `transformers` has expert layers."""
    return any(hasattr(module, "has_gate") for module in model.modules())


def tokens(name: str, device: str, *, seed: int = 0, count: int | None = None) -> Tensor:
    """Return random token ids (batch, length), as many as the shape's step has."""
    shape = SHAPES[name]
    total = count or shape.tokens
    length = min(SEQUENCE, total)
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(0, shape.sizes["vocab_size"], (total // length, length), generator=generator, device=device)


def compile_layers(model: nn.Module, **options: Any) -> None:
    """Let torch.compile each decoder layer for itself by its options, as training frameworks do."""
    for layer in model.get_submodule("model.layers").children():
        layer.compile(**options)


def step(model: nn.Module, ids: Tensor) -> Tensor:
    """Run a forward and a backward pass with new gradients, and return the loss."""
    model.zero_grad(set_to_none=True)
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def convert_by_torchao(model: nn.Module, *, dense: bool) -> None:
    """Let torchao multiply a model's experts, and with `dense` its dense layers, in fp8.

    torchao 0.18 takes groups of multiples of 16 rows alone, so the experts run in a forward whose gather pads each group.
    """
    if has_experts(model):
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register("torchao_aligned", _torchao_experts)
        model.set_experts_implementation("torchao_aligned")  # type: ignore[operator]
    if dense:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("tensorwise")
        convert_to_float8_training(model, config=config, module_filter_fn=_takes_torchao_dense)


def _takes_torchao_dense(module: nn.Module, name: str) -> bool:
    """Return whether torchao multiplies a linear layer in fp8: the same layers that ours does."""
    return isinstance(module, nn.Linear) and name != "lm_head" and why_not_fp8(module) is None


def _torchao_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run experts as the library's `grouped_mm` does, with groups padded to 16 rows by the gather, in torchao's fp8."""
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm as multiply

    top_k = top_k_index.shape[-1]
    expert_of_row, order = torch.sort(top_k_index.reshape(-1))
    experts = torch.arange(module.num_experts, device=expert_of_row.device, dtype=expert_of_row.dtype)
    ends = torch.searchsorted(expert_of_row, experts, right=True, out_int32=True)
    rows, offs, total = aligned_groups(ends, expert_of_row.shape[0])
    source = order.new_zeros(total).scatter_(0, rows, order // top_k)
    is_token = torch.zeros(total, 1, dtype=torch.bool, device=expert_of_row.device).index_fill_(0, rows, True)
    x = torch.where(is_token, hidden_states[source], 0)
    options = {"out_dtype": torch.bfloat16, "float8_dtype": torch.float8_e4m3fn, "pad_token_groups_for_grouped_mm": False}
    up = multiply(x, module.gate_up_proj.transpose(-2, -1), offs, **options)
    y = multiply(apply_gate(module, up), module.down_proj.transpose(-2, -1), offs, **options)
    place = torch.empty_like(order)
    place[order] = rows
    copies = y[place] * top_k_weights.reshape(-1, 1)
    out: Tensor = copies.view(hidden_states.shape[0], top_k, -1).sum(1).to(hidden_states.dtype)
    return out
