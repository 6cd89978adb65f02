"""Convert a model of transformers to fp8 training, and back.

    python convert_model.py KIND
    python convert_model.py size HIDDEN

Prints as JSON the losses of three steps in bf16 and fp8, what was converted, what was not and why, how far the gradients of the
converted and of the reverted model are from the gradients in bf16, and the time of a step before and after.
"""

import copy
import json
import sys
import warnings
from typing import Any

import torch
import transformers
from measured_step import BF16, DEVICE, milliseconds, sized

from kerneltune.nn import convert_to_fp8_training, revert_from_fp8_training

HIDDEN, HEADS, TOKENS = sized(2048, 64), sized(16, 2), sized(1024, 24)
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)
INNER = sized(1408, 32)
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "d_model": HIDDEN, "intermediate_size": sized(5632, 96), "d_ff": sized(5632, 96),
    "num_hidden_layers": 2, "num_layers": 2, "num_attention_heads": HEADS, "num_heads": HEADS, "num_key_value_heads": HEADS // 2,
    "head_dim": HIDDEN // HEADS, "d_kv": HIDDEN // HEADS, "vocab_size": sized(8192, 128), "max_position_embeddings": 4096,
    "pad_token_id": 0, "shared_expert_intermediate_size": INNER, "moe_intermediate_size": INNER, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "kv_lora_rank": sized(512, 32), "q_lora_rank": sized(512, 32), "qk_rope_head_dim": sized(64, 16),
    "qk_nope_head_dim": sized(128, 16), "v_head_dim": sized(128, 16), "bos_token_id": 1, "eos_token_id": 2,
    "cls_token_id": 1, "sep_token_id": 2, "moe_num_experts": 8, "moe_k": 2,
    **EXPERTS,
}  # fmt: skip
OWN_SIZES: dict[str, dict[str, Any]] = {"deepseek_v2": {"num_key_value_heads": HEADS}, "falcon": {"head_dim": None}}
"""Sizes of a family that differ; None where it takes none."""


def model_of(kind: str, **sizes: Any) -> torch.nn.Module:
    """Return a model with random weights in bf16."""
    config = transformers.CONFIG_MAPPING[kind]().get_text_config()
    wanted = SIZES | OWN_SIZES.get(kind, {}) | sizes
    known = {name: size for name, size in wanted.items() if size is not None and hasattr(config, name)}
    torch.manual_seed(0)
    config = type(config)(**known)
    if kind == "t5":
        model: Any = transformers.T5EncoderModel(config)
    elif kind == "vit":
        model = transformers.ViTModel(config)
    elif kind == "siglip_vision_model":
        model = transformers.SiglipVisionModel(config)
    elif kind in ("bert", "modernbert"):
        model = transformers.AutoModelForMaskedLM.from_config(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(DEVICE, BF16)


def loss_of(model: Any, kind: str, tokens: int = TOKENS) -> torch.Tensor:
    """Return the loss of a fixed batch: the language model's, or the mean square distance from fixed values."""
    torch.manual_seed(1)
    if kind in ("vit", "siglip_vision_model"):
        pixels = torch.randn(sized(16, 1), 3, model.config.image_size, model.config.image_size).to(DEVICE, BF16)
        output = model(pixel_values=pixels).last_hidden_state
    else:
        words = torch.randint(3, model.config.vocab_size, (2, tokens // 2)).to(DEVICE)
        if kind != "t5":
            return model(input_ids=words, labels=words).loss
        output = model(input_ids=words).last_hidden_state
    target = torch.randn(output.shape).to(output)
    return (output - target).float().square().mean()


def losses(model: torch.nn.Module, kind: str) -> list[float]:
    """Return the losses of three steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found = []
    for _ in range(3):
        loss = loss_of(model, kind)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss))
    return found


def gradients(model: torch.nn.Module, kind: str) -> dict[str, torch.Tensor]:
    """Return the gradients of a step by parameter."""
    model.zero_grad()
    loss_of(model, kind).backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return found


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the distance of all gradients from other gradients, relative to their norm."""
    apart = sum(float((found[name] - value).float().square().sum()) for name, value in wanted.items())
    return float((apart / sum(float(value.float().square().sum()) for value in wanted.values())) ** 0.5)


def step_ms(model: torch.nn.Module, kind: str, tokens: int) -> float:
    """Return the milliseconds of an eager forward and backward pass."""

    def step() -> None:
        model.zero_grad()
        loss_of(model, kind, tokens).backward()

    return milliseconds(step)


def main(kind: str, hidden: str = "") -> None:
    """Train, convert, train, revert."""
    warnings.simplefilter("ignore")
    row: dict[str, Any] = {"kind": kind}
    if kind == "size":
        kind, wide, tokens = "llama", sized(int(hidden), 96), sized(4096, 24)
        sizes = {"hidden_size": wide, "intermediate_size": wide * 7 // 2, "num_attention_heads": wide // 32, "head_dim": 32}
        if DEVICE == "cuda":
            sizes |= {"num_attention_heads": wide // 128, "num_key_value_heads": wide // 256, "head_dim": 128}
        model = model_of(kind, **sizes)
    else:
        model, tokens = model_of(kind), TOKENS
    trained = copy.deepcopy(model)
    row["bf16"] = losses(trained, kind)
    wanted = gradients(model, kind)
    row["bf16_ms"] = step_ms(model, kind, tokens)
    trained = copy.deepcopy(model)
    try:
        found = convert_to_fp8_training(model, "tensorwise", dense=True)
    except ValueError as error:
        print(json.dumps(row | {"refused": str(error)}))
        return
    row["converted"], row["skipped"] = len(found), str(found).splitlines()
    convert_to_fp8_training(trained, "tensorwise", dense=True)
    row["gradients"] = distance(gradients(model, kind), wanted)
    row["fp8"] = losses(trained, kind)
    row["fp8_ms"] = step_ms(model, kind, tokens)
    revert_from_fp8_training(model)
    row["reverts"] = distance(gradients(model, kind), wanted)
    row["largest"] = max(abs(a - b) / abs(a) for a, b in zip(row["bf16"], row["fp8"], strict=True))
    print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
