"""Measure the memory that a training step of an expert layer keeps for its backward pass, and its peak. Needs a GPU.

Run `python examples/moe_memory.py deepseek-v3-16b-up-32768`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kerneltune import ops, sweep_file, workloads
from kerneltune.nn.grouped_mm import fp8_grouped_mm
from kerneltune.nn.kept_weights import KeptWeights
from kerneltune.nn.recipes import SCALINGS, Recipe
from kerneltune.spec import Case
from kerneltune.workloads.moe_training import inputs


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a step, without its inputs: weights, gradient of the result, and the tensors that make the rows.

    Attributes:
        kept: from forward to backward, the result not counted.
        workspace: of weights that are cast once for many microbatches.
        peak: the most at any time of the step, gradients included, the workspace not.
    """

    kept: int
    workspace: int
    peak: int


def step_memory(case: Case) -> dict[str, Memory]:
    """Memory of a case's step in bf16 and under our recipes, the weights cast in the step or cached."""
    found = {"bf16": _measured(case, lambda a, b, offs: torch.nn.functional.grouped_mm(a, b, offs=offs), 0)}
    recipes = {
        "tensorwise": Recipe("tensorwise"),
        "tensorwise, weights cast twice": Recipe("tensorwise", keep_weights=False),
        "rowwise": Recipe("rowwise"),
    }
    for name, recipe in recipes.items():
        found[name] = _measured(case, partial(fp8_grouped_mm, recipe=recipe), 0)
    for name in SCALINGS:
        w = inputs(case, device="cuda")["w"]
        kept = KeptWeights(w.shape[0], w.device)
        weights = kept.current(w, Recipe(name), update=True)
        found[f"{name}, cached"] = _measured(case, partial(fp8_grouped_mm, recipe=name, weights=weights), kept.nbytes)
        del kept, weights, w
    return found


def _measured(case: Case, product: Callable[[Tensor, Tensor, Tensor], Tensor], workspace: int) -> Memory:
    """Run two steps and return the second."""
    for _ in range(2):
        made = inputs(case, device="cuda")
        leaf, w = made["a"].requires_grad_(), made["w"].requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        a = leaf.clone()  # as an activation, which lives as long as something needs it
        y = product(a, w.transpose(1, 2), made["offs"])
        del a
        kept = torch.cuda.memory_allocated() - before - y.nbytes
        y.backward(made["dy"])
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del y, w, leaf, made
    return Memory(kept, workspace, peak)


def memory_text(found: dict[str, Memory]) -> str:
    """Make the table, in MB."""
    width = max(map(len, found))
    lines = [f"{'':{width}}  kept MB  workspace MB  peak MB"]
    for name, memory in found.items():
        lines.append(f"{name:{width}}  {memory.kept / 1e6:7.0f}  {memory.workspace / 1e6:12.0f}  {memory.peak / 1e6:7.0f}")
    return "\n".join(lines) + "\n"


def main(name: str) -> None:
    """Print the memory of a bench case of `moe_training`, by its name, under balanced groups."""
    known = {**ops.load(), **workloads.load()}
    entries = sweep_file.load(sweep_file.find("moe_training"), known).bench
    cases = {entry.case.name: entry.case for entry in entries if entry.case.option("groups") == "balanced"}
    if name not in cases:
        sys.exit(f"case: {name!r}: expected one of {', '.join(cases)}")
    print(memory_text(step_memory(cases[name])))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
