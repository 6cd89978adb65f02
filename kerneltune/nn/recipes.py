"""Name the recipes by which the operands of products are scaled to fp8."""

from dataclasses import dataclass

SCALINGS = ("tensorwise", "rowwise")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Compute fresh scales in every step; all operands are e4m3.

    Attributes:
        scaling: `tensorwise` has a scale per activation or gradient tensor and a scale per expert's weights. `rowwise` has a
            scale per row of an operand: per token and per weight column, and for the weight gradient per group and column.
        pow2: whether scales are rounded down to powers of two.
        keep_weights: whether the forward pass also casts the weights' transpose and keeps it for the backward pass, E K N bytes.
            If False, the backward pass casts the weights again, which takes one launch more, under tensorwise two. An Fp8Linear
            then also keeps its input instead of the input's cast, because other operators often keep this input anyway.
    """

    scaling: str = "tensorwise"
    pow2: bool = True
    keep_weights: bool = True

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling must be one of {', '.join(SCALINGS)}, got {self.scaling!r}")


def recipe_of(recipe: str | Recipe, *others: str) -> Recipe:
    """Return the recipe, or the default recipe of a scaling's name; the error message also lists the names in `others`."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in SCALINGS:
        raise ValueError(f"recipe must be one of {', '.join((*SCALINGS, *others))} or a Recipe, got {recipe!r}")
    return Recipe(recipe)
