"""Peers: plain torch, weight by weight, or compiled as a function of all weights."""

from functools import partial
from typing import Any

import torch

from kerneltune.kernel_lib.compiled import DEFAULT, EAGER, call
from kerneltune.kernel_lib.tl_lib import FP8_DTYPES
from kerneltune.spec import Case, Inputs, Outputs, Variant

_MOST_COMPILED = 64
"""Weights per compiled function, because torch.compile unrolls the loop over the weights."""


def _cast_all(scales: torch.Tensor, amaxes: torch.Tensor, *weights_and_dtype: Any) -> tuple[Any, ...]:
    *xs, dtype = weights_and_dtype
    limit = torch.finfo(dtype).max
    casts = [(x.float() * scale).clamp(-limit, limit).to(dtype) for x, scale in zip(xs, scales.unbind(), strict=True)]
    magnitudes = [x.float().abs().nan_to_num(nan=0.0, posinf=torch.inf).amax() for x in xs]
    raised = torch.maximum(amaxes, torch.stack(magnitudes))
    return casts, [q.t().contiguous() for q in casts], raised, scales.reciprocal()


def run(mode: str, inputs: Inputs, _config: None) -> Outputs:
    """Cast as `multi_cast_transpose` in torch, operator by operator, or by torch.compile with its defaults."""
    scales, amaxes = inputs["scales"], inputs["amaxes"]
    tensors = (scales, amaxes, *(inputs[f"x{i}"] for i in range(scales.shape[0])))
    dtype = FP8_DTYPES[inputs["fp8_format"]]
    casts, transposes, raised, scale_inv = call(_cast_all, mode, tensors, dtype)
    amaxes.copy_(raised)
    named = {f"q{i}": q for i, q in enumerate(casts)} | {f"qt{i}": q for i, q in enumerate(transposes)}
    return named | {"scale_inv": scale_inv}


def unsupported(case: Case) -> str | None:
    """Refuse matrices without elements, which have no maximum."""
    return "no elements" if case["M"] == 0 or case["N"] == 0 else None


def not_compiled(case: Case) -> str | None:
    """Refuse matrices without elements, and lists that torch.compile takes minutes for."""
    return f"one function of more than {_MOST_COMPILED} weights" if case["T"] > _MOST_COMPILED else unsupported(case)


VARIANTS = (
    Variant("compile", partial(run, DEFAULT), unsupported=not_compiled, requires=("torch",), compiles=True),
    Variant("eager", partial(run, EAGER), unsupported=unsupported, requires=("torch",)),
)
