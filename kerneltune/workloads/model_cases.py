"""Write the cases of every operator that a language model uses as the text of a sweep. Imports no operator."""

import re
from collections.abc import Iterator, Sequence

from kerneltune.rounding import ALIGNED, cdiv
from kerneltune.workloads.model_config import Experts, Model

_GROUPS = (128, 64, 32)
"""Values that share a scale in an int4 weight, as many as `Int4Linear` takes unless told, if the weight's depth allows."""
_MOST_EXPERTS = 1024
_LONGEST_NAME, _LONGEST_KIND = 150, 70

CaseFields = tuple[tuple[str, object], ...]


_Line = tuple[str, str, CaseFields]
"""The common name of a layer, the operator, and its axes, type and options."""


def model_sweep_text(model: Model, tokens: Sequence[int], batches: Sequence[int], ep: int = 1) -> str:
    """Return the sweep of a model's layers: norms, experts, casts of their operands, routing, and int4 projections.

    Args:
        tokens: tokens that a GPU trains on at a time.
        batches: tokens of a decoding step, for int4.
        ep: GPUs that share the experts of a layer.
    """
    lines = list(_lines(model, tokens, batches, ep))
    if not lines:
        raise ValueError(f"{model.path}: model_type: {model.kind!r}: no layer for which there is an operator")
    named: dict[tuple[str, CaseFields], list[str]] = {}
    for layer, op, fields in lines:
        layers = named.setdefault((op, fields), [])
        if layer not in layers:
            layers.append(layer)
    kind = re.sub(r"[^\w.-]+", "-", model.kind, flags=re.ASCII).strip("-.") or "model"
    family = f"{kind[:_LONGEST_KIND]}-{model.hidden}"
    shared = f", experts on {ep} GPUs" if ep > 1 and model.experts is not None else ""
    head = f"# {kind}: {', '.join(map(str, tokens))} tokens{shared}. Written by `kerneltune cases`."
    ops = ", ".join(dict.fromkeys(op for op, _ in named))
    text = [head, f"# Read as {model.read_as}.", f"family: {family}", f"ops: [{ops}]", "", "bench:"]
    for (op, fields), layers in named.items():
        name = _joined(layers, fields)
        text.append(f"  - {{name: {name}, op: {op}, {', '.join(f'{key}: {_shown(value)}' for key, value in fields)}}}")
    return "\n".join(text) + "\n"


def _joined(layers: Sequence[str], fields: CaseFields) -> str:
    """Return a name with the layers of a case and the number of its tokens."""
    sizes = dict(fields)
    rows = (
        sizes.get("N") if "M" in sizes and "K" in sizes and "group" in sizes else sizes.get("M", sizes.get("T", sizes.get("E")))
    )
    return f"{'+'.join(layers)[:_LONGEST_NAME]}-{rows}"


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _lines(model: Model, tokens: Sequence[int], batches: Sequence[int], ep: int) -> Iterator[_Line]:
    for count in tokens:
        yield from _norms(model, count)
    if model.experts is not None:
        local = _local(model, model.experts, ep)
        for count in tokens:
            yield from _expert_products(model, model.experts, local, count)
            yield from _routing(model, model.experts, local, count)
        yield from _expert_weights(model, model.experts, local)
    for count in batches:
        yield from _projections(model, count)


def _norms(model: Model, tokens: int) -> Iterator[_Line]:
    """Yield each RMSNorm, forward and backward."""
    for layer, rows, width in model.norms:
        shape = (
            ("M", tokens * rows), ("N", width), ("dtype", model.dtype), ("quant", "none"), ("zero_centered", model.zero_centered),
        )  # fmt: skip
        yield layer, "rmsnorm_fwd", shape
        yield layer, "rmsnorm_bwd", shape


def _local(model: Model, experts: Experts, ep: int) -> int:
    """Return the number of experts of one GPU."""
    if experts.count % ep:
        raise ValueError(f"{model.path}: {experts.count_field}: {experts.count}: expected a multiple of ep={ep}")
    if experts.count // ep > _MOST_EXPERTS:
        raise ValueError(
            f"{model.path}: {experts.count_field}: {experts.count}: expected at most {_MOST_EXPERTS} experts per GPU"
        )
    for name, size in (("hidden_size", model.hidden), (experts.width_field, experts.width)):
        if size % ALIGNED:
            raise ValueError(f"{model.path}: {name}: {size}: expected a multiple of {ALIGNED}, as products of experts support")
    return experts.count // ep


def _expert_layers(model: Model, experts: Experts) -> list[tuple[str, int, int]]:
    """Return the name, outputs and inputs of fused gate and up, or up alone, and of down."""
    up = ("experts.gate-up", 2 * experts.width) if model.gated else ("experts.up", experts.width)
    return [(*up, model.hidden), ("experts.down", model.hidden, experts.width)]


def _expert_products(model: Model, experts: Experts, local: int, tokens: int) -> Iterator[_Line]:
    """Yield the forward product and both gradients of fused gate and up and of down, and the casts of their activations."""
    rows = cdiv(tokens * experts.top_k, ALIGNED) * ALIGNED
    for layer, n, k in _expert_layers(model, experts):
        for suffix, cols, depth, product in (("", n, k, "rows"), (".dgrad", k, n, "rows"), (".wgrad", n, k, "weights")):
            sizes = (("M", rows), ("N", cols), ("K", depth), ("E", local), ("dtype", model.dtype), ("product", product))
            yield layer + suffix, "fp8_grouped_gemm", sizes
        for what, width in ((f"{layer}.x", k), (f"{layer}.dy", n)):
            yield what, "fp8_group_both", (("M", rows), ("K", width), ("G", local), ("dtype", model.dtype))
            yield what, "fp8_tensorwise_2d", (("M", rows), ("K", width), ("dtype", model.dtype), ("layout", "both"))


def _routing(model: Model, experts: Experts, local: int, tokens: int) -> Iterator[_Line]:
    """Yield the sort of tokens, copies to experts and sums back, forward and backward; SwiGLU and its gradient with casts."""
    of_tokens = (("T", tokens), ("H", model.hidden), ("E", local), ("K", experts.top_k))
    if experts.top_k <= local:
        yield "experts.sort", "moe_sort", (*of_tokens[:1], *of_tokens[2:], ("dtype", "int64"))
        yield "experts.copy", "moe_permute_fp8", (*of_tokens, ("dtype", "uint8"), ("quant", "fp8"))
        for op in ("moe_permute", "moe_unpermute", "moe_unpermute_bwd"):
            yield "experts.copy" if op == "moe_permute" else "experts.sum", op, (*of_tokens, ("dtype", model.dtype))
        yield "experts.copy.dx", "moe_unpermute", (*of_tokens, ("dtype", model.dtype), ("weighted", False))
    if model.has_swiglu:
        rows = (("M", tokens * experts.top_k), ("N", experts.width), ("G", local), ("dtype", model.dtype), ("quant", "fp8"))
        for op in ("fp8_swiglu_2d", "fp8_swiglu_bwd_2d"):
            yield "experts.swiglu" if op == "fp8_swiglu_2d" else "experts.swiglu.dx", op, rows


def _expert_weights(model: Model, experts: Experts, local: int) -> Iterator[_Line]:
    """Yield the casts of expert weights, which do not depend on tokens."""
    for layer, n, k in _expert_layers(model, experts):
        sizes = (("E", local), ("K", k), ("N", n), ("dtype", model.dtype))
        yield f"{layer}.weight", "fp8_rowwise_3d_both", sizes
        yield f"{layer}.weight", "fp8_tensorwise_3d", (*sizes, ("layout", "both"))
        yield f"{layer}.weight", "multi_cast_transpose", (("T", local), ("M", n), ("N", k), ("dtype", model.dtype))


def _projections(model: Model, tokens: int) -> Iterator[_Line]:
    """Yield int4 products of attention, dense layers and shared experts."""
    if model.dtype == "float32":
        return
    for layer, (out, depth) in model.projections.items():
        group = next((group for group in _GROUPS if depth % group == 0), None)
        if group is not None and out % 2 == 0:
            sizes = (("N", tokens), ("M", out), ("K", depth), ("dtype", model.dtype), ("group", group))
            yield layer, "int4_gemm", sizes
