"""Multiply dense layers in fp8, forward and backward."""

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
from kerneltune.nn.fp8_products import cast_for_product, cast_traced_for_product, cast_traced_weights
from kerneltune.nn.grouped_mm import fp8_grouped_mm
from kerneltune.nn.kept_weights import KeptWeights
from kerneltune.nn.recipes import Recipe, recipe_of
from kerneltune.ops import fp8

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
        b_t, fed = self.weight.t()[None], getattr(x, "kerneltune_fed", None)
        w = self.fp8_kept.weights(b_t, how)
        if how.keep_weights or w is not None or fed is not None:
            w = cast_traced_weights(b_t, how, self.fp8_kept.amax) if w is None else w
            operands = [*(fed or _cast_rows(_rows(x, dtype), how)), w.q[0], w.scale, w.q_t[0], w.scale_t]
        else:
            q, scale = cast_traced_for_product(b_t, how)
            operands = [*_cast_rows_once(_rows(x, dtype), how), q[0], scale]
        y: Tensor = fp8_linear(x, self.weight, operands, how.scaling, how.pow2, dtype)
        return y

    def extra_repr(self) -> str:
        """Return the text that `print(module)` shows."""
        return f"{super().extra_repr()}, recipe={self.fp8_recipe}"


@untraced
def _delayed_product(layer: Fp8Linear, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply under delayed scaling, whole, because torch.compile fails behind the graph break inside."""
    rows = x.reshape(-1, layer.in_features)
    offs = _one_offset(rows)
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


def _rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x (…, K) as rows (M, K) of a type.

    A compiled graph casts a tensor once for all of its layers, because inductor merges equal operators. Eagerly each layer casts,
    because a change through `x.data` leaves no trace that a kept cast could be checked by.
    """
    return row_major(x.detach().reshape(-1, x.shape[-1]).to(dtype))


def feed(carrier: Tensor, casts: Casts) -> Tensor:
    """Give a tensor the fp8 operands that Fp8Linear layers read in its place; gradients flow to the tensor."""
    carrier.kerneltune_fed = casts  # type: ignore[attr-defined]
    return carrier


def _cast_rows(rows: Tensor, how: Recipe) -> Casts:
    """Return rows (M, K) in fp8 in both layouts, each with its scale."""
    ops = torch.ops.kerneltune
    if how.scaling == "tensorwise":
        q, q_t, scale = ops.fp8_tensorwise_2d(rows, layout="both", pow2=how.pow2, inverse=True)
        return q, scale, q_t, scale
    q, scale, q_t, scale_t = ops.fp8_group_both(rows, _one_offset(rows), pow2=how.pow2, inverse=True)
    return q, scale, q_t, scale_t


def _cast_rows_once(rows: Tensor, how: Recipe) -> tuple[Tensor, Tensor]:
    """Return rows (M, K) in fp8 for the forward product alone, and their scale."""
    ops = torch.ops.kerneltune
    if how.scaling == "tensorwise":
        q, scale = ops.fp8_tensorwise_2d(rows, pow2=how.pow2, inverse=True)
    else:
        q, scale = ops.fp8_rowwise_2d(rows, pow2=how.pow2, inverse=True)
    return q, scale


def _one_offset(rows: Tensor) -> Tensor:
    """Return the end of all rows as a single group."""
    return torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)


@custom_op("kerneltune::fp8_linear")
def fp8_linear(x: Tensor, weight: Tensor, operands: list[Tensor], scaling: str, pow2: bool, dtype: torch.dtype) -> Tensor:
    """Multiply operands that were cast before; the backward pass casts the gradient once for both of its products.

    Args:
        x, weight: (…, K) and (N, K), the sources of the operands: they get the gradients. The forward product does not read them.
        operands: x in fp8 as q, scale, q_t and scale, then weight (K, N) likewise. Or only q and scale of both: then the backward
            pass reads x and weight, and casts them again.
        scaling, pow2: of the Recipe, for the gradient.
        dtype: of the result.
    """
    half = len(operands) // 2
    y = product(operands[0], operands[half], operands[1], operands[half + 1], dtype)
    # in the result's shape, because FSDP2 warns of views; and no view, because autograd lets no caller change that in place
    return unsafe_view(y, [*x.shape[:-1], weight.shape[0]])


@fp8_linear.register_fake
def _(x: Tensor, weight: Tensor, operands: list[Tensor], scaling: str, pow2: bool, dtype: torch.dtype) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, operands, ctx.scaling, ctx.pow2, ctx.dtype = inputs
    ctx.dtypes, ctx.shape, ctx.count = (x.dtype, weight.dtype), x.shape, len(operands)
    ctx.save_for_backward(*((*operands[2:4], *operands[6:8]) if ctx.count == 8 else (x, weight)))


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    for_dx, for_dw = ctx.needs_input_grad[:2]
    rows, dx, dw = row_major(dy.reshape(-1, dy.shape[-1])), None, None
    if ctx.count == 8:
        x_t, scale_x, w_t, scale_w = ctx.saved_tensors
        q, scale, q_t, scale_t = _cast_rows(rows, Recipe(ctx.scaling, pow2=ctx.pow2))
        dx = product(q, w_t, scale, scale_w, ctx.dtypes[0]) if for_dx else None
        dw = product(q_t.t(), x_t, scale_t, scale_x, ctx.dtypes[1]) if for_dw else None
    else:
        made = fp8_linear_bwd(rows, *ctx.saved_tensors, ctx.scaling, ctx.pow2, ctx.dtype, for_dx, for_dw)
        dx, dw = made[0] if for_dx else None, made[-1] if for_dw else None
    return dx if dx is None else dx.view(ctx.shape), dw, [None] * ctx.count, None, None, None


@custom_op("kerneltune::fp8_linear_bwd")
def fp8_linear_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, scaling: str, pow2: bool, dtype: torch.dtype, for_dx: bool, for_dw: bool
) -> list[Tensor]:
    """Return dx (M, K) and dW (N, K), as asked for, from operands that are all cast here.

    An operator of its own, because the compiler would move casts that do not depend on dy to the forward pass and keep them.

    Args:
        dy, x, weight: (M, N), (…, K) and (N, K).
        scaling, pow2: of the Recipe.
        dtype: in which x is cast, as in the forward pass.
        for_dx, for_dw: which gradients to return.
    """
    q, scale, q_t, scale_t = _cast_rows(dy, Recipe(scaling, pow2=pow2))
    made = []
    if for_dx:
        w_t, scale_w = cast_for_product(weight[None], scaling, pow2)
        made.append(product(q, w_t[0], scale, scale_w, x.dtype))
        del w_t
    del q
    if for_dw:
        rows = _rows(x, dtype)
        if scaling == "tensorwise":
            cast = fp8.fp8_tensorwise_2d(rows, layout="col", pow2=pow2, inverse=True)
            x_t, scale_x = cast.q_t, cast.scale
        else:
            x_t, scale_x = fp8.fp8_group_colwise(rows, _one_offset(rows), pow2=pow2, inverse=True)
        assert x_t is not None
        made.append(product(q_t.t(), x_t, scale_t, scale_x, weight.dtype))
    return made


@fp8_linear_bwd.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, scaling: str, pow2: bool, dtype: torch.dtype, for_dx: bool, for_dw: bool
) -> list[Tensor]:
    made = [x.new_empty((dy.shape[0], x.shape[-1]))] if for_dx else []
    return made + ([weight.new_empty(weight.shape)] if for_dw else [])


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
    offs = _one_offset(a)
    scale_b = scale_b.reshape(1, -1) if scale_b.numel() > 1 else scale_b.view(1)
    y: Tensor = torch.ops.kerneltune.fp8_grouped_gemm(a, b[None], scale_a.reshape(-1), scale_b, offs, dtype)
    return y
