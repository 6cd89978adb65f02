"""Recipes by which the operands of products are scaled to fp8. Values only; may import the standard library."""

from dataclasses import dataclass

SCALINGS = ("tensorwise", "rowwise")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Fresh scales in every step, e4m3 throughout.

    Attributes:
        scaling: `tensorwise`, one scale per activation or gradient tensor and one per expert's weights; or `rowwise`, one per
            row of what is multiplied: per token and per weight column, and for the weight gradient per group and column.
        pow2: scales rounded down to powers of two.
        keep_weights: the weights' fp8 transpose, made beside the cast of the forward, waits for the backward,
            E K N bytes; else the backward reads the weights again, one launch more, two under tensorwise.

    Raises:
        ValueError: an unknown scaling.
    """

    scaling: str = "tensorwise"
    pow2: bool = True
    keep_weights: bool = True

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling must be one of {', '.join(SCALINGS)}, got {self.scaling!r}")


def recipe_of(recipe: str | Recipe, *others: str) -> Recipe:
    """Return the recipe, or that of a scaling's name with its defaults. others: further accepted names, for the message.

    Raises:
        ValueError: neither.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if recipe not in SCALINGS:
        raise ValueError(f"recipe must be one of {', '.join((*SCALINGS, *others))} or a Recipe, got {recipe!r}")
    return Recipe(recipe)
