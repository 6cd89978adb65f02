"""Measure whole training steps of models: time, memory, where the GPU's time goes, launches, and losses. Needs a GPU.

Run `python examples/model_steps.py qwen3-30b-a3b tensorwise --dense --compiled`, or with `bf16` in place of the recipe.
`phi-3.5-moe`, whose experts are wide, is in no sweep.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from kerneltune.nn import convert_to_fp8_training
from kerneltune.nn.recipes import SCALINGS, Recipe
from kerneltune.workloads import models

WIDE_EXPERTS = models.ModelShape("phimoe", 8192, {
    "vocab_size": 16384, "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 2, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2, "output_router_logits": False,
})  # fmt: skip

GROUPED = ("grouped_gemm", "GroupGemm", "GroupProblemShape", "grouped_mm", "_weight_gradient")
KINDS = {
    "fused by the compiler": ("triton_poi", "triton_red", "triton_per"),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "expert products": GROUPED,
    "casts": ("cast", "quant", "amax", "fp8", "float8", "transpose_bytes", "segments"),
    "dense products": ("nvjet", "gemm", "cutlass", "cublas", "xmma", "s16816"),
    "routing": ("index", "gather", "scatter", "sort", "Sort", "radix", "Radix", "topk", "searchsorted", "permute", "route"),
}
"""Kinds of kernels, and parts of their names; the first that fits counts."""


@dataclass
class Measures:
    """The figures of a model's steps.

    Attributes:
        step_ms: median time of a step, forward and backward, in a run of several.
        tokens_per_s: of the step.
        peak_gb: the most memory at any time of a step, weights included, GB (1e9).
        kept_gb: weights and gradients alone.
        launches: kernels of a step.
        graph_breaks: of torch.compile, of all layers.
        gpu_ms: kind of kernel to its time in a step; `all` is the sum.
        largest: name of kernel to its time in a step, the largest first.
        losses: of training steps on the same tokens.
    """

    step_ms: float = 0.0
    tokens_per_s: float = 0.0
    peak_gb: float = 0.0
    kept_gb: float = 0.0
    launches: int = 0
    graph_breaks: int = 0
    gpu_ms: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)


def measure(
    name: str,
    convert: Callable[[nn.Module], object],
    *,
    is_compiled: bool,
    num_steps: int = 5,
    num_losses: int = 0,
) -> Measures:
    """Return the measures of a model's steps after three that warm up.

    Args:
        name: of `models.SHAPES`.
        convert: changes the model in place.
        is_compiled: whether its layers are compiled.
        num_steps: of each of three runs that are timed.
        num_losses: steps of SGD to train after that.
    """
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    model = models.build(name, "cuda")
    convert(model)
    if is_compiled:
        models.compile_layers(model)
    ids = models.tokens(name, "cuda")
    found = Measures(kept_gb=2 * sum(p.nbytes for p in model.parameters()) / 1e9)
    for _ in range(3):
        models.step(model, ids)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found.step_ms = statistics.median(_times(model, ids, num_steps))
    found.peak_gb = torch.cuda.max_memory_allocated() / 1e9
    found.tokens_per_s = ids.numel() / found.step_ms * 1e3
    found.graph_breaks = sum(counters["graph_break"].values())
    found.gpu_ms, found.largest, found.launches = _profile(model, ids)
    if num_losses:
        found.losses = _train(model, ids, num_losses)
    return found


def _times(model: nn.Module, ids: Tensor, count: int) -> list[float]:
    """Return milliseconds per step of three runs of several steps without a wait between them, as training loops make them."""
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(count):
            models.step(model, ids)
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - started) / count)
    return found


def _profile(model: nn.Module, ids: Tensor) -> tuple[dict[str, float], dict[str, float], int]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        models.step(model, ids)
        torch.cuda.synchronize()
    events = [(e.key, e.self_device_time_total / 1e3, e.count) for e in profiled.key_averages() if e.self_device_time_total > 0]
    return by_kind((key, ms) for key, ms, _ in events), _largest(events), sum(count for *_, count in events)


def by_kind(kernels: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the time of each of KINDS, of `other`, and of `all`, from (name of a kernel, its time)."""
    found = dict.fromkeys([*KINDS, "other", "all"], 0.0)
    for name, ms in kernels:
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
        found[kind] += ms
        found["all"] += ms
    return {kind: round(ms, 2) for kind, ms in found.items()}


def _largest(events: list[tuple[str, float, int]], count: int = 24) -> dict[str, float]:
    ordered = sorted(events, key=lambda event: -event[1])[:count]
    return {f"{key[:90]} x{times}": round(ms, 2) for key, ms, times in ordered}


def _train(model: nn.Module, ids: Tensor, count: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    found = []
    for _ in range(count):
        found.append(models.step(model, ids))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [round(float(loss), 4) for loss in found]


def main(arguments: list[str] | None = None) -> None:
    """Print the measures of a model and a recipe as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    models.SHAPES.setdefault("phi-3.5-moe", WIDE_EXPERTS)
    parser.add_argument("model", choices=sorted(models.SHAPES))
    parser.add_argument("recipe", choices=("bf16", "tensorwise", "rowwise", "delayed", "torchao"))
    parser.add_argument("--dense", action="store_true", help="dense layers in fp8 as well")
    parser.add_argument("--compiled", action="store_true", help="decoder layers compiled")
    parser.add_argument("--cast-twice", action="store_true", help="keep no casts for the backward pass")
    parser.add_argument("--losses", type=int, default=0, metavar="N", help="train N steps after that")
    given = parser.parse_args(arguments)
    if given.cast_twice and given.recipe not in SCALINGS:
        parser.error(f"--cast-twice: expected with {' or '.join(SCALINGS)}, not {given.recipe}")
    recipe = Recipe(given.recipe, keep_weights=False) if given.cast_twice else given.recipe
    convert: Callable[[nn.Module], object] = partial(convert_to_fp8_training, recipe=recipe, dense=given.dense)
    if given.recipe == "bf16":
        convert = nn.Module.train  # the model stays in bf16
    elif given.recipe == "torchao":
        convert = partial(models.convert_by_torchao, dense=given.dense)
    found = measure(given.model, convert, is_compiled=given.compiled, num_losses=given.losses)
    print(json.dumps(asdict(found), indent=1))


if __name__ == "__main__":
    main()
