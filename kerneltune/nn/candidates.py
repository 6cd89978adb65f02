"""Find the layers of a model that can multiply in fp8, and say why others stay as they are."""

from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from kerneltune.compat import has_hooks
from kerneltune.nn.converted import Converted, expert_weights, family_of
from kerneltune.nn.forward_code import names_in_forward
from kerneltune.nn.fp8_linear import Fp8Linear, why_not_fp8
from kerneltune.nn.grouped_linear import GroupedLinear
from kerneltune.nn.recipes import Recipe

_PRODUCTS = {"@", "bmm", "matmul", "_grouped_mm", "grouped_mm"}

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_DENSE = {"input_layernorm": _ATTENTION, "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")}
_READERS: dict[str, dict[str, tuple[str, ...]]] = {
    "LlamaDecoderLayer": _DENSE,
    "MistralDecoderLayer": _DENSE,
    "Qwen2DecoderLayer": _DENSE,
    "Qwen3DecoderLayer": _DENSE,
    "Qwen3MoeDecoderLayer": {"input_layernorm": _ATTENTION},
    "DeepseekV3DecoderLayer": {"input_layernorm": ("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa")},
}
"""Class of a decoder layer of transformers to its normalizations, and the linear layers that alone read each of them."""

Reasons = dict[str, tuple[nn.Module, str | None]]
"""Name of a module to the module, and why it is not converted, or None."""


def experts_of(model: nn.Module) -> Reasons:
    """Return the modules with expert weights, and those whose class is named so but whose weights have other axes."""
    found: Reasons = {}
    for name, module in model.named_modules():
        if expert_weights(module):
            found[name] = module, _why_not_experts(module)
        elif "expert" in type(module).__name__.lower() and any(p.ndim > 1 for p in module.parameters(recurse=False)):
            found[name] = module, f"a {type(module).__name__} without weights of three axes (E, N, K)"
    return found


def _why_not_experts(module: nn.Module) -> str | None:
    is_known = isinstance(module, GroupedLinear | Converted) or family_of(module) is not None
    if is_known or not _PRODUCTS.isdisjoint(names_in_forward(module)):
        return None
    return f"the code of {type(module).__name__}.forward makes no grouped or batched product with its weights of three axes"


def linears_of(model: nn.Module) -> Reasons:
    """Return the linear layers of a model; output layers, routers and layers for which fp8 does not pay have a reason to stay."""
    reasons = dict.fromkeys(_output_layers(model), "the model's output layer") | _routers(model)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: (module, reasons.get(module) or why_not_fp8(module)) for name, module in linears.items()}


def _output_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the output layers that a model or its parts name, and layers in no list of the shape of the largest embedding."""
    for module in model.modules():
        try:
            found = cast(Any, module).get_output_embeddings()
        except (AttributeError, NotImplementedError):  # of a module that has none
            continue
        if isinstance(found, nn.Module):
            yield found
    largest = max((module.weight.shape for module in model.modules() if isinstance(module, nn.Embedding)), default=None)
    repeated = {part for module in model.modules() if isinstance(module, nn.ModuleList) for part in module.modules()}
    for module in model.modules():
        if isinstance(module, nn.Linear) and module not in repeated and module.weight.shape == largest:
            yield module


def _routers(model: nn.Module) -> dict[nn.Module, str]:
    """Return the linear layers beside experts that have an output for each of them, and why they stay as they are."""
    found: dict[nn.Module, str] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            count = _num_experts(name, child)
            others = [m for other in parent.children() if other is not child for m in other.modules()] if count > 1 else []
            reason = f"a router, which chooses among {count} experts"
            found |= {m: reason for m in others if isinstance(m, nn.Linear) and m.out_features == count}
    return found


def _num_experts(name: str, module: nn.Module) -> int:
    """Return how many experts a module holds; 0 for another module."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return len(module) if "expert" in name else 0
    weights = [] if isinstance(module, GroupedLinear) else list(expert_weights(module).values())
    return weights[0].shape[0] if weights else 0


def feeding_norms(model: nn.Module) -> Reasons:
    """Return the RMS normalizations of a model, with None for those that only linear layers in fp8 read."""
    found: Reasons = {}
    for layer_name, layer in model.named_modules():
        is_known = type(layer).__module__.startswith("transformers.models.")
        for norm_name, readers in _READERS.get(type(layer).__name__, {}).items() if is_known else ():
            norm = layer.get_submodule(norm_name)
            found[f"{layer_name}.{norm_name}".removeprefix(".")] = norm, _why_not_fed(layer, norm, readers)
    why = "linear layers in fp8 alone must read it: no known decoder layer says so"
    others = {n: (m, why) for n, m in model.named_modules() if "RMSNorm" in type(m).__name__ and n not in found}
    return found | others


def _why_not_fed(layer: nn.Module, norm: nn.Module, readers: tuple[str, ...]) -> str | None:
    cls = type(norm).__mro__[2] if isinstance(norm, Converted) else type(norm)
    if cls.__module__ != type(layer).__module__ or not cls.__name__.endswith("RMSNorm") or "forward" in vars(norm):
        return f"a {cls.__name__}, which may have a forward of its own"
    if has_hooks(norm):
        return "hooks read its result"
    modules = dict(layer.named_modules())
    for name in readers:
        reader = modules.get(name)
        if not isinstance(reader, Fp8Linear):
            return f"{name}, which reads it, does not multiply in fp8"
        if not isinstance(reader.fp8_recipe, Recipe) or reader.fp8_recipe.scaling != "tensorwise":
            return f"{name}, which reads it, has another scaling than tensorwise"
        if has_hooks(reader):
            return f"hooks read the input of {name}"
    return None
