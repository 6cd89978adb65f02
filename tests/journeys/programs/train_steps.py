"""Convert a tiny model of transformers to fp8, take three steps, revert: `train_steps.py dense|experts eager|compiled`."""

import copy
import sys

import torch
import transformers

from kerneltune.nn import convert_to_fp8_training, revert_from_fp8_training

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
STEPS, TOKENS = 3, 64 if HAS_GPU else 16
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512}
CONFIGS = {
    "dense": ("llama", {"hidden_size": 1024, "intermediate_size": 1024}),
    "experts": (
        "qwen3_moe",
        {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2},
    ),
}


def make(kind):
    """Return a model in bf16 with random weights."""
    torch.manual_seed(0)
    name, sizes = CONFIGS[kind]
    config = transformers.CONFIG_MAPPING[name](**SIZES, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(DEVICE)


def losses(model, is_compiled):
    """Take steps of one batch; return the loss before each."""
    if is_compiled:
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    tokens = torch.randint(0, SIZES["vocab_size"], (1, TOKENS), device=DEVICE)
    values = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def main(kind, way):
    """Compare the losses with losses in bf16, and the reverted model with a model that was never converted."""
    model = make(kind)
    names = list(model.state_dict())
    expected = losses(copy.deepcopy(model), False)
    converted = convert_to_fp8_training(model, "tensorwise", experts=kind == "experts", dense=kind == "dense")
    print(converted)
    assert converted, "nothing was converted"
    values = losses(model, way == "compiled")
    print("bf16", expected, "fp8", values)
    assert values[-1] < values[0], "the loss does not fall"
    assert all(abs(a - b) < 0.05 * abs(b) for a, b in zip(values, expected, strict=True)), "losses differ by more than 5 %"
    if way == "compiled":
        breaks = dict(torch._dynamo.utils.counters["graph_break"])
        assert not breaks, f"graph breaks: {breaks}"
    assert sorted(revert_from_fp8_training(model)) == sorted(converted)
    assert list(model.state_dict()) == names
    plain = make(kind)
    plain.load_state_dict(model.state_dict())
    reverted = make(kind)
    convert_to_fp8_training(reverted, "tensorwise", experts=kind == "experts", dense=kind == "dense")
    reverted.load_state_dict(model.state_dict())
    revert_from_fp8_training(reverted)
    tokens = torch.arange(TOKENS, device=DEVICE)[None] % SIZES["vocab_size"]
    with torch.no_grad():
        assert torch.equal(plain(tokens).logits, reverted(tokens).logits), "a reverted model computes something else"
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
