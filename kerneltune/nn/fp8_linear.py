"""Multiply dense layers in fp8: a linear layer whose three products read operands that were cast once."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerneltune.compat import scaled_mm, unsafe_view, untraced
from kerneltune.kernel_lib.arguments import DTYPE_NAMES
from kerneltune.kernel_lib.functions import custom_op
from kerneltune.nn.alignment import ALIGNED, row_major
from kerneltune.nn.autocast import output_dtype
from kerneltune.nn.delayed import DelayedScaling
from kerneltune.nn.fp8_products import cast_traced_weights
from kerneltune.nn.grouped_mm import fp8_grouped_mm
from kerneltune.nn.kept_weights import KeptWeights
from kerneltune.nn.recipes import Recipe, recipe_of

LEAST_SIZE = 350
"""The least N K / (N + K) for which fp8 pays. Per token, products save 4e-15 s for each of N K values, and casts cost 1.4e-12 s
for each of N + K values: an H200 multiplies at about 650 TFLOP/s in bf16 and 1150 in fp8, and moves 4.2 TB/s."""

Casts = tuple[Tensor, Tensor, Tensor, Tensor]
"""q (M, K) row-major and its scale, q_t (M, K) column-major and its scale."""


class Fp8Linear(nn.Linear):
    """Multiply as `nn.Linear` does, in fp8: y = x Wᵀ + bias, with gradients in fp8 as well.

    Args:
        in_features, out_features: K, N; multiples of 16.
        recipe: `tensorwise`, `rowwise`, a Recipe, or `delayed`, which takes `update_scales` once per optimizer step and breaks
            torch.compile's graph.

    Raises:
        ValueError: a size or recipe that does not fit.
    """

    fp8_recipe: Recipe | str
    fp8_scaling: DelayedScaling | None
    fp8_kept: KeptWeights

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str | Recipe = "tensorwise",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.set_recipe(recipe)

    @staticmethod
    def from_linear(linear: nn.Linear, recipe: str | Recipe) -> "Fp8Linear":
        """Make a linear layer multiply in fp8, in place; parameters and hooks stay.

        Raises:
            ValueError: a size, type or recipe that does not fit; the layer stays as it is.
        """
        if type(linear) not in (nn.Linear, Fp8Linear):
            raise ValueError(f"from_linear takes an nn.Linear, got {type(linear).__name__}")
        _check_sizes(linear)
        chosen = recipe if recipe == "delayed" else recipe_of(recipe, "delayed")
        linear.__class__ = Fp8Linear
        assert isinstance(linear, Fp8Linear)
        linear.set_recipe(chosen)
        return linear

    def to_linear(self) -> nn.Linear:
        """Make the layer multiply as `nn.Linear` again, in place."""
        del self.fp8_recipe, self.fp8_scaling, self.fp8_kept
        self.__class__ = nn.Linear  # type: ignore[assignment]
        return self

    def set_recipe(self, recipe: str | Recipe) -> None:
        """Multiply by another recipe from now on.

        Raises:
            ValueError: an unknown recipe, or sizes that are no multiples of 16.
        """
        _check_sizes(self)
        self.fp8_recipe = recipe if recipe == "delayed" else recipe_of(recipe, "delayed")
        self.fp8_scaling = DelayedScaling(1, device=self.weight.device) if recipe == "delayed" else None
        self.fp8_kept = KeptWeights(1, self.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x (…, K) to (…, N) of x's type, or of the autocast type.

        Raises:
            ValueError: another last axis, or a tensor on another device.
        """
        if x.ndim < 1 or x.shape[-1] != self.in_features or x.device != self.weight.device:
            raise ValueError(
                f"Fp8Linear takes (…, {self.in_features}) on {self.weight.device}, got {tuple(x.shape)} on {x.device}"
            )
        if x.numel() == 0:
            return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))
        if (padding := -(x.numel() // self.in_features) % ALIGNED) != 0:  # the weight gradient's products contract over rows
            padded = F.pad(x.reshape(-1, self.in_features), (0, 0, 0, padding))
            y: Tensor = self(padded)[:-padding].view(*x.shape[:-1], self.out_features)
            return y.clone()  # because FSDP2 loses its hooks where a caller changes a view in place
        y = self._product(x, output_dtype(x))
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        how = self.fp8_recipe
        if not isinstance(how, Recipe):
            return _delayed_product(self, x, dtype)
        w = self.fp8_kept.weights(self.weight.t()[None], how)
        if w is None:
            w = cast_traced_weights(self.weight.t()[None], how, self.fp8_kept.amax)
        return _multiply(x, self.weight, casts_of(x, how), w, how, dtype)

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return f"{super().extra_repr()}, recipe={self.fp8_recipe}"


@untraced
def _delayed_product(layer: Fp8Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply under delayed scaling, whole, because torch.compile fails behind the graph break inside."""
    rows = x.reshape(-1, layer.in_features)
    offs = torch.full((1,), rows.shape[0], dtype=torch.int32, device=x.device)
    scaling: Any = layer.fp8_scaling
    w = layer.fp8_kept.weights(layer.weight.t()[None], scaling)
    y = fp8_grouped_mm(rows.to(dtype), layer.weight.t()[None], offs, recipe=scaling, weights=w)
    return y.view(*x.shape[:-1], layer.out_features)


def _check_sizes(linear: nn.Linear) -> None:
    N, K = linear.weight.shape
    if not N or not K or N % ALIGNED or K % ALIGNED:
        raise ValueError(f"Fp8Linear takes in_features and out_features that are multiples of {ALIGNED}, got {K} and {N}")


def why_not_fp8(linear: nn.Linear) -> str | None:
    """Return why a linear layer is better left in bf16, or None."""
    if type(linear) not in (nn.Linear, Fp8Linear) or ("forward" in vars(linear) and type(linear) is not Fp8Linear):
        return f"a {type(linear).__name__}, which may have a forward of its own"
    N, K = linear.weight.shape
    if linear.weight.dtype not in DTYPE_NAMES:
        return f"its weight must be one of {', '.join(DTYPE_NAMES.values())}, got {linear.weight.dtype}"
    if not N or not K or N % ALIGNED or K % ALIGNED:
        return f"in_features and out_features must be multiples of {ALIGNED}, got {K} and {N}"
    if N * K / (N + K) < LEAST_SIZE:
        return f"{K} x {N} is too small: casts would cost more than the products save"
    return None


def casts_of(x: Tensor, recipe: Recipe) -> Casts:
    """Return x (…, K) in fp8 in both layouts: the operands that `feed` gave the tensor, or else its cast.

    A compiled graph casts a tensor once for all of its layers, because the compiler merges equal operators. Eagerly each layer
    casts, because a change through `x.data` leaves no trace that a kept cast could be checked by.
    """
    fed: Casts | None = getattr(x, "kerneltune_fed", None)
    return _cast_rows(x.detach().reshape(-1, x.shape[-1]).to(output_dtype(x)), recipe) if fed is None else fed


def feed(carrier: Tensor, casts: Casts) -> Tensor:
    """Give a tensor the operands that Fp8Linear layers read in its place; gradients flow to the tensor."""
    carrier.kerneltune_fed = casts  # type: ignore[attr-defined]
    return carrier


def _cast_rows(rows: Tensor, how: Recipe) -> Casts:
    """Return rows (M, K) in fp8 in both layouts, each with what to multiply its values by."""
    rows, ops = row_major(rows), torch.ops.kerneltune
    if how.scaling == "tensorwise":
        q, q_t, scale = ops.fp8_tensorwise_2d(rows, layout="both", pow2=how.pow2, inverse=True)
        return q, scale, q_t, scale
    offs = torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)
    q, scale, q_t, scale_t = ops.fp8_group_both(rows, offs, pow2=how.pow2, inverse=True)
    return q, scale, q_t, scale_t


def _multiply(x: Tensor, weight: Tensor, casts: Casts, w: Any, how: Recipe, dtype: torch.dtype) -> Tensor:
    operands = (*casts, w.q[0], w.scale, w.q_t[0], w.scale_t)
    y: Tensor = fp8_linear(x, weight, list(operands), how.scaling, how.pow2, dtype)
    return y


@custom_op("kerneltune::fp8_linear")
def fp8_linear(x: Tensor, weight: Tensor, operands: list[Tensor], scaling: str, pow2: bool, dtype: torch.dtype) -> Tensor:
    """Multiply operands that were cast before; the backward pass casts the gradient once for both of its products.

    Args:
        x, weight: (…, K) and (N, K), which the operands were cast from: they get the gradients, and are not read.
        operands: x in fp8 as q, scale, q_t and scale, then weight (K, N) likewise.
        scaling, pow2: of the Recipe, for the gradient.
        dtype: of the result.
    """
    y = product(operands[0], operands[4], operands[1], operands[5], dtype)
    # in the result's shape, because FSDP2 warns of views; and no view, because autograd lets no caller change that in place
    return unsafe_view(y, [*x.shape[:-1], weight.shape[0]])


@fp8_linear.register_fake
def _(x: Tensor, weight: Tensor, operands: list[Tensor], scaling: str, pow2: bool, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, operands, ctx.scaling, ctx.pow2, _ = inputs
    ctx.dtypes, ctx.shape = (x.dtype, weight.dtype), x.shape
    ctx.save_for_backward(*operands[2:4], *operands[6:8])


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x_t, scale_x, w_t, scale_w = ctx.saved_tensors
    q, scale, q_t, scale_t = _cast_rows(dy.reshape(-1, dy.shape[-1]), Recipe(ctx.scaling, pow2=ctx.pow2))
    dx = product(q, w_t, scale, scale_w, ctx.dtypes[0]).view(ctx.shape) if ctx.needs_input_grad[0] else None
    dw = product(q_t.t(), x_t, scale_t, scale_x, ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
    return dx, dw, [None] * 8, None, None, None


fp8_linear.register_autograd(_backward, setup_context=_save)


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply a (M, K) row-major with b (K, N) column-major, both e4m3, times their scales.

    Args:
        scale_a: (1,), or of M elements, one per row.
        scale_b: (1,), or of N elements, one per column.
    """
    M, K = a.shape
    if not a.is_cuda or K % ALIGNED or dtype == torch.float32:
        return _one_group(a, b, scale_a, scale_b, dtype)
    if scale_a.numel() == 1 and scale_b.numel() == 1:
        scales = scale_a.view(()), scale_b.view(())
    else:
        scales = scale_a.reshape(-1, 1).expand(M, 1).contiguous(), scale_b.reshape(1, -1).expand(1, b.shape[1]).contiguous()
    return scaled_mm(a, b, *scales, out_dtype=dtype, use_fast_accum=True)


def _one_group(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply as one group of a grouped product, which takes any number of rows."""
    offs = torch.full((1,), a.shape[0], dtype=torch.int32, device=a.device)
    scale_b = scale_b.reshape(1, -1) if scale_b.numel() > 1 else scale_b.view(1)
    y: Tensor = torch.ops.kerneltune.fp8_grouped_gemm(a, b[None], scale_a.reshape(-1), scale_b, offs, dtype)
    return y
