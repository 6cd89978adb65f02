"""Cast rows and weights to fp8 by a recipe with fresh scales; `delayed.py` has the scales of past steps.

In nn a scale is a factor (x ≈ q * scale); in ops/fp8 it is a multiplier (q = fp8(x * scale)) unless `inverse`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kerneltune.kernel_lib.functions import custom_op
from kerneltune.kernel_lib.tl_lib import INTERPRETED
from kerneltune.ops import fp8

SCALINGS = ("tensorwise", "rowwise")


class Scaled(NamedTuple):
    """Hold an operand of one product: fp8 values, and the factors that turn the values into x."""

    q: Any = None
    scale: Any = None


class Fp8Operand(NamedTuple):
    """Hold a pair of `Scaled` of the same rows or weight, each for one product; None for a tensor that no product reads.

    | | rows x, or dY | weight (E, K, N) |
    |---|---|---|
    | q | (M, K) row-major, for Y, or for dX | (E, K, N), strides (K N, 1, K), for Y |
    | scale | factors of q | (E,) or (E, N) fp32 |
    | q_t | (M, K) column-major, the bytes of the transpose, for dW | (E, N, K), strides (N K, 1, N), for dX |
    | scale_t | factors of q_t | (E,) or (E, K) fp32; may be `scale` |
    """

    q: Any = None
    scale: Any = None
    q_t: Any = None
    scale_t: Any = None

    def transposed(self) -> "Fp8Operand":
        """Return the operand of the transposed weight."""
        return Fp8Operand(self.q_t, self.scale_t, self.q, self.scale)

    def split(self) -> tuple[Scaled, Scaled]:
        """Return the operands of the two products: q and its scale, and q_t and its scale."""
        return Scaled(self.q, self.scale), Scaled(self.q_t, self.scale_t)


class AnyRecipe(Protocol):
    """Cast the operands of a weight's products: what a Recipe and a DelayedScaling have in common."""

    @property
    def keep_weights(self) -> bool:
        """Return whether the forward pass casts the weights for dX, too."""

    @property
    def is_rowwise(self) -> bool:
        """Return whether a weight has a scale for each column."""

    @property
    def uses_amax(self) -> bool:
        """Return whether a cast of weights in both layouts is faster with the largest magnitudes of the cast before."""

    def can_write(self, skip: Tensor | None) -> bool:
        """Return whether `write_weights` supports a flag on the device, or None for no flag."""

    def cast_rows(
        self, x: Tensor, offs: Tensor | None, *, for_product: bool = True, for_dw: bool = True, is_gradient: bool = False
    ) -> Fp8Operand:
        """Cast rows x (M, K) or their gradient, in groups that end at offs, for the product with a weight, and for dW."""

    def cast_weights(self, b: Tensor, *, for_dx: bool = True, amax: Tensor | None = None) -> Fp8Operand:
        """Cast a weight b (E, K, N) of either order for the forward product, and for dX.

        amax: of `fp8_tensorwise_3d`, where `uses_amax` and `for_dx`; else ignored.
        """

    def write_weights(self, into: Fp8Operand, b: Tensor, amax: Tensor, skip: Tensor | None) -> None:
        """Cast b (E, K, N), of either order, into the tensors of an earlier cast of the same size.

        skip: one value, not 0 to leave `into` as it is; None where `can_write` refuses a flag.
        """


@dataclass(frozen=True, slots=True)
class Recipe:
    """Compute fresh scales in every step; all operands are e4m3.

    Attributes:
        scaling: `tensorwise` has a scale per activation or gradient tensor and a scale per expert's weights. `rowwise` has a
            scale per row of an operand: per token and per weight column, and for the weight gradient per group and column.
        pow2: whether multipliers are rounded down, that is scales rounded up, to powers of two.
        keep_weights: whether the forward pass also casts the weights' transpose and keeps it for the backward pass, E K N
            bytes. If False, the backward pass casts the weights again, which takes one launch more, under tensorwise two. An
            Fp8Linear then also keeps its input instead of the input's cast, because other operators often keep this input
            anyway.
    """

    scaling: str = "tensorwise"
    pow2: bool = True
    keep_weights: bool = True

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling must be one of {', '.join(SCALINGS)}, got {self.scaling!r}")

    @property
    def is_rowwise(self) -> bool:
        """Return whether each row of an operand has a scale."""
        return self.scaling == "rowwise"

    @property
    def uses_amax(self) -> bool:
        """Return whether a cast of weights in both layouts is faster with the largest magnitudes of the cast before."""
        return self.scaling == "tensorwise" and self.pow2 and self.keep_weights

    def can_write(self, skip: Tensor | None) -> bool:
        """Return whether there is no flag, because casts with fresh scales read none."""
        return skip is None

    def cast_rows(
        self, x: Tensor, offs: Tensor | None, *, for_product: bool = True, for_dw: bool = True, is_gradient: bool = False
    ) -> Fp8Operand:
        """Cast x (M, K) along its rows for the product with a weight, and down its columns for dW.

        Rows behind the last group have no part in any scale. With offs the cast for dW holds aligned groups.
        """
        ops, options = torch.ops.kerneltune, {"pow2": self.pow2, "inverse": True}
        if not self.is_rowwise:
            return cast_tensorwise(ops.fp8_tensorwise_2d, x, offs=offs, for_product=for_product, for_dw=for_dw, **options)
        if not for_dw:
            q, scale = ops.fp8_rowwise_2d(x, **options)
            return Fp8Operand(q, scale.view(-1))
        ends = one_group(x) if offs is None else offs
        shape, options["aligned"] = (ends.shape[0], x.shape[1]), offs is not None
        if not for_product:
            q_t, scale_t = ops.fp8_group_colwise(x, ends, **options)
            return Fp8Operand(q_t=q_t, scale_t=scale_t.view(shape))
        q, scale, q_t, scale_t = ops.fp8_group_both(x, ends, **options)
        return Fp8Operand(q, scale.view(-1), q_t, scale_t.view(shape))

    def cast_weights(self, b: Tensor, *, for_dx: bool = True, amax: Tensor | None = None) -> Fp8Operand:
        """Cast a weight b (E, K, N) of either order for the forward product, and for dX.

        amax: of `fp8_tensorwise_3d`; ignored under `rowwise`, and without `for_dx` or pow2.
        """
        if not torch.compiler.is_compiling() and not (b.is_cuda or INTERPRETED or b.is_meta):
            raise ValueError(f"weights must be on a GPU, or kernels interpreted (TRITON_INTERPRET=1), got weights on {b.device}")
        is_contiguous, ops, options = b.is_contiguous(), torch.ops.kerneltune, {"pow2": self.pow2, "inverse": True}
        w = b.mT if is_contiguous else b
        E, _, N = w.shape
        if for_dx:
            if self.is_rowwise:
                q, scale, q_t, scale_t = ops.fp8_rowwise_3d_both(w, **options)
                made = Fp8Operand(q, scale.view(E, N), q_t, scale_t)
            elif amax is not None and self.pow2:
                q, scale, q_t = expected_weights(w, amax)
                made = Fp8Operand(q, scale, q_t, scale)
            else:
                q, q_t, scale = ops.fp8_tensorwise_3d(w, layout="both", **options)
                made = Fp8Operand(q, scale, q_t, scale)
            return made.transposed() if is_contiguous else made
        if not self.is_rowwise:
            return Fp8Operand(*ops.fp8_tensorwise_3d(w, layout="col" if is_contiguous else "row", **options))
        if is_contiguous:
            return Fp8Operand(*ops.fp8_rowwise_3d_transpose(w, **options))
        q, scale = ops.fp8_colwise_3d(w, **options)
        return Fp8Operand(q, scale.view(E, N))

    def write_weights(self, into: Fp8Operand, b: Tensor, amax: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Cast b (E, K, N), of either order, into the tensors of an earlier cast of the same size."""
        if b.is_contiguous():
            b, into = b.mT, into.transposed()
        if self.is_rowwise:
            layouts = fp8.BothLayouts(into.q, into.scale.unsqueeze(1), into.q_t, into.scale_t)
            fp8.fp8_rowwise_3d_both(b, pow2=self.pow2, inverse=True, out=layouts)
        else:
            out = fp8.SegmentOutput(into.q, into.q_t, into.scale)
            fp8.fp8_tensorwise_3d(b, layout="both", pow2=self.pow2, inverse=True, amax=amax, out=out)


def cast_tensorwise(
    cast: Callable[..., Any], *operands: Tensor | None, for_product: bool = True, for_dw: bool = True, **options: Any
) -> Fp8Operand:
    """Cast rows along, for a product, and down their columns, for dW, by an operator with a tensor-wise scale.

    cast: the operator; returns q, q_t or both by its layout, and the scale.
    """
    layout = "both" if for_product and for_dw else "row" if for_product else "col"
    *made, scale = cast(*operands, layout=layout, **options)
    along = Scaled(made[0], scale) if for_product else Scaled()
    down = Scaled(made[-1], scale) if for_dw else Scaled()
    return Fp8Operand(*along, *down)


def recipe_of(recipe: str | Recipe, *others: str) -> Recipe:
    """Return the recipe, or the default recipe of a scaling's name; the error message also lists the names in `others`."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in SCALINGS:
        raise ValueError(f"recipe must be one of {', '.join((*SCALINGS, *others))} or a Recipe, got {recipe!r}")
    return Recipe(recipe)


def one_group(rows: Tensor) -> Tensor:
    """Return the end of all rows as a single group."""
    return torch.full((1,), rows.shape[0], dtype=torch.int32, device=rows.device)


@custom_op("kerneltune::fp8_expected_weights", mutates_args=("amax",))
def expected_weights(w: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast w (E, K, N) tensor-wise per expert and write its largest magnitudes to amax: q, scale and q_t."""
    made = fp8.fp8_tensorwise_3d(w, layout="both", inverse=True, amax=amax)
    assert made.q is not None and made.q_t is not None
    return made.q, made.scale, made.q_t


@expected_weights.register_fake
def _(w: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, q_t, scale = torch.ops.kerneltune.fp8_tensorwise_3d(w, layout="both", inverse=True)
    return q, scale, q_t
