"""Measure a projection of an expert layer in training, forward and backward, in bf16, by torchao and by ours, whole and in parts.

    Y = A Wᵀ      dA = dY W      dW = dYᵀ A      for every group of tokens with its expert's W

Variants named after a recipe of kerneltune.nn run the step; with `_compiled` under torch.compile, with `_casts` only its
casts, with `_gemms` only its products, with `_cached` the step with weights cast before, with `_refresh` the cast of the
weights into their workspace. In bf16 a step must read and write as many bytes as its casts must, so that time at the ceiling
is the least that the casts can take.
"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from kerneltune.kernel_lib.compiled import compiled_for
from kerneltune.kernel_lib.groups import bounds, group_ends
from kerneltune.nn.delayed import DelayedScaling
from kerneltune.nn.grouped_mm import fp8_grouped_mm
from kerneltune.nn.kept_weights import KeptWeights
from kerneltune.nn.recipes import SCALINGS, Fp8Operand, Recipe
from kerneltune.ops.fp8_grouped_gemm import fp8_grouped_gemm
from kerneltune.rounding import ALIGNED
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant
from kerneltune.workloads import once

_LEAST_SQNR_DB, _LEAST_CAST_SQNR_DB = 26.0, 28.0
_INTERPRETER_DB = 12.0
"""Signal to noise that the interpreter's casts may lose: they lose the carry of some roundings."""
_WEIGHT_STD, _GRADIENT_STD = 0.02, 1e-3


def inputs(case: Case, *, device: str, seed: int = 0) -> Inputs:
    """Make a (M, K), w (E, N, K), dy (M, N) bf16, normal, and offs (E,) int32; variants add precast operands when needed."""
    M, K, N, E = (case[axis] for axis in "MKNE")
    a, w, dy = (torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in ((M, K), (E, N, K), (M, N)))
    if device != "meta":
        generator = torch.Generator(device=device).manual_seed(seed)
        for t, std in ((a, 1.0), (w, _WEIGHT_STD), (dy, _GRADIENT_STD)):
            t.normal_(std=std, generator=generator)
    return {"a": a, "w": w, "dy": dy, "offs": group_ends(case, E, device, seed)}


def reference(inputs: Inputs) -> Outputs:
    """Compute expert by expert in fp32."""
    a, w, dy = inputs["a"], inputs["w"], inputs["dy"]
    (M, K), (E, N, _) = a.shape, w.shape
    y, da, dw = (a.new_empty(shape, dtype=torch.float32) for shape in ((M, N), (M, K), (E, N, K)))
    for e, (start, end) in enumerate(bounds(inputs["offs"])):
        rows, expert, grad = a[start:end].float(), w[e].float(), dy[start:end].float()
        y[start:end], da[start:end], dw[e] = rows @ expert.t(), grad @ expert, grad.t() @ rows
    return {"y": y, "da": da, "dw": dw}


def compare(_case: Case, inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    """Signal to quantisation noise: of results against fp32; casts, given as (values, scale), are compared with their inputs."""
    errors = []
    allowed = 0.0 if inputs["a"].is_cuda else _INTERPRETER_DB
    for name, got in outputs.items():
        if name in expected:
            least, ratio = _LEAST_SQNR_DB - allowed, _sqnr_db(got.float(), expected[name])
        else:
            q, scale = got
            least, ratio = _LEAST_CAST_SQNR_DB - allowed, _sqnr_db(q.float() * scale, inputs[name].float())
        if not ratio >= least:
            errors.append(f"{name}: {ratio:.1f} dB of signal to noise, expected {least:g} or more")
    return errors


def _sqnr_db(got: Tensor, want: Tensor) -> float:
    noise = torch.linalg.vector_norm(got - want)
    return float(20 * torch.log10(torch.linalg.vector_norm(want) / noise.clamp(min=1e-30)))


def traffic(case: Case) -> Traffic:
    """Count a, w and dy read; y, da and dw written."""
    M, K, N, E = (case[axis] for axis in "MKNE")
    moved = 2 * (M * K + E * N * K + M * N)
    return Traffic(moved + 4 * E, moved)


def flops(case: Case) -> int:
    """Return the operations of the three products."""
    return 6 * case["M"] * case["K"] * case["N"]


def _step(product: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs) -> Outputs:
    """Run the forward and backward pass of a product of a, the transposed view of w, and offs."""
    a, w = inputs["a"].detach().requires_grad_(), inputs["w"].detach().requires_grad_()
    y = product(a, w.transpose(1, 2), inputs["offs"])
    da, dw = torch.autograd.grad(y, (a, w), inputs["dy"])
    return {"y": y.detach(), "da": da, "dw": dw}


def run_bf16(inputs: Inputs, _config: None) -> Outputs:
    """Run the step with torch's grouped product."""
    return _step(lambda a, b, offs: torch.nn.functional.grouped_mm(a, b, offs=offs), inputs)


def run_torchao(inputs: Inputs, _config: None) -> Outputs:
    """Run the step with torchao's row-wise training product."""
    from torchao.prototype.moe_training.fp8_grouped_mm import _to_fp8_rowwise_then_scaled_grouped_mm as product

    return _step(partial(product, pad_token_groups_for_grouped_mm=False), inputs)


def run_step(recipe: str, inputs: Inputs, _config: None) -> Outputs:
    """Call `fp8_grouped_mm` as GroupedLinear does: the largest magnitudes of the weights come from the step before."""
    return _step(partial(fp8_grouped_mm, recipe=_how(recipe, inputs), amax=_amax(inputs)), inputs)


def _how(recipe: str, inputs: Inputs) -> Recipe | DelayedScaling:
    """Return a recipe; `delayed` has its scales from a step before."""

    def known() -> DelayedScaling:
        scaling = DelayedScaling(inputs["w"].shape[0], device=inputs["w"].device)
        _step(partial(fp8_grouped_mm, recipe=scaling), inputs)
        scaling.update()
        return scaling

    how: Recipe | DelayedScaling = once(inputs, "delayed scaling", known) if recipe == "delayed" else Recipe(recipe)
    return how


def _amax(inputs: Inputs) -> Tensor:
    w = inputs["w"]
    amax: Tensor = once(inputs, "amax", lambda: torch.zeros(w.shape[0], dtype=torch.float32, device=w.device))
    return amax


def run_compiled(scaling: str, inputs: Inputs, _config: None) -> Outputs:
    """Run the step under torch.compile."""
    return _step(partial(compiled_for(_product(scaling), inputs["a"].shape, inputs["w"].shape), _amax(inputs)), inputs)


@cache
def _product(scaling: str) -> Callable[..., Tensor]:
    """Return `fp8_grouped_mm` with a recipe: the same function object at every call, so that torch compiles it once."""

    def product(amax: Tensor, a: Tensor, b_t: Tensor, offs: Tensor) -> Tensor:
        return fp8_grouped_mm(a, b_t, offs, recipe=scaling, amax=amax)

    return product


def run_cached(recipe: str, inputs: Inputs, _config: None) -> Outputs:
    """`fp8_grouped_mm` with weights that were cast before: a later microbatch."""
    weights = once(inputs, f"{recipe} weights", lambda: _weights(recipe, inputs))
    return _step(partial(fp8_grouped_mm, recipe=_how(recipe, inputs), weights=weights), inputs)


def _weights(recipe: str, inputs: Inputs) -> Fp8Operand:
    return _how(recipe, inputs).cast_weights(inputs["w"].transpose(1, 2), amax=_amax(inputs))


def run_refresh(recipe: str, inputs: Inputs, _config: None) -> Outputs:
    """Cast the weights into kept memory, as the first microbatch does."""
    w = inputs["w"]
    kept: KeptWeights = once(inputs, f"{recipe} kept", lambda: KeptWeights(w.shape[0], w.device))
    return {"w": _cast_of_w(kept.current(w, _how(recipe, inputs), update=True))}


def _cast_of_w(weights: Fp8Operand) -> tuple[Tensor, Tensor]:
    return weights.q.transpose(1, 2), weights.scale.view(*weights.scale.shape[:2], *[1] * (3 - weights.scale.ndim))


def _casts(recipe: str, inputs: Inputs) -> dict[str, list[Tensor]]:
    """Run all casts of a step: of a, w and dy for Y and dA, and of a and dy for dW, each as fp8 and scale."""
    a, dy, offs, how = inputs["a"], inputs["dy"], inputs["offs"], _how(recipe, inputs)
    rows, gradient = how.cast_rows(a, offs), how.cast_rows(dy, offs, is_gradient=True)
    made = {"a": rows[:2], "w": _weights(recipe, inputs), "dy": gradient[:2], "a_t": rows[2:], "dy_t": gradient[2:]}
    return {name: [t for t in operand if t is not None] for name, operand in made.items()}


def run_casts(recipe: str, inputs: Inputs, _config: None) -> Outputs:
    """Run all casts of a step, no product."""
    casts = _casts(recipe, inputs)
    a, dy = ((q, scale.view(-1, 1)) for q, scale in (casts["a"], casts["dy"]))
    return {"a": a, "dy": dy, "w": _cast_of_w(Fp8Operand(*casts["w"]))}


def run_gemms(recipe: str, inputs: Inputs, _config: None) -> Outputs:
    """Return the three products of a step, of operands that were cast before."""
    casts = once(inputs, f"{recipe} casts", lambda: _casts(recipe, inputs))
    offs = inputs["offs"]
    (a, s_a), (dy, s_dy), (a_t, s_a_t), (dy_t, s_dy_t) = (casts[name] for name in ("a", "dy", "a_t", "dy_t"))
    q, scale, q_t, scale_t = casts["w"]
    y = fp8_grouped_gemm(a, q, s_a.view(-1), scale, offs)
    da = fp8_grouped_gemm(dy, q_t, s_dy.view(-1), scale_t, offs)
    return {"y": y, "da": da, "dw": fp8_grouped_gemm(dy_t.t(), a_t, s_dy_t, s_a_t, offs, aligned=True)}


def empty_groups(case: Case) -> str | None:
    """Say why torch's products for training do not support a case."""
    smallest = min(end - start for start, end in bounds(group_ends(case, case["E"], "cpu", 0)))
    return "groups of no rows, on which torch's products may stop the device" if smallest < ALIGNED else None


_RUNS: dict[str, Callable[[str, Inputs, None], Outputs]] = {
    "": run_step, "_compiled": run_compiled,
    "_cached": run_cached, "_refresh": run_refresh, "_casts": run_casts, "_gemms": run_gemms,
}  # fmt: skip
_STEPS = ("", "_compiled")
_RECIPES = dict.fromkeys(SCALINGS, tuple(_RUNS)) | {"delayed": ("", "_cached", "_refresh", "_casts")}
"""Recipe -> suffixes of its timed variants. `delayed` lacks a compiled variant, because its graph breaks, and products,
because they equal the products of `tensorwise`."""

OPS = (
    Op(
        name="moe_step",
        axes=("M", "K", "N", "E"),
        dtypes=("bfloat16",),
        quants=("fp8",),
        options={"groups": ("balanced", "zipf")},
        inputs=inputs,
        reference=reference,
        compare=compare,
        traffic=traffic,
        flops=flops,
        module=__name__,
        variants=(
            Variant("baseline", run_bf16, unsupported=empty_groups, requires=("torch",)),
            *(
                Variant(f"{recipe}{suffix}", partial(_RUNS[suffix], recipe), part=suffix not in _STEPS)
                for recipe, suffixes in _RECIPES.items()
                for suffix in suffixes
            ),
            Variant("torchao_rowwise", run_torchao, unsupported=empty_groups, requires=("torchao",)),
        ),
    ),
)
