"""Keep what the fp8 products of a converted module need from step to step, and multiply with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kerneltune.compat import grouped_mm, plain_tensors
from kerneltune.nn.alignment import row_major
from kerneltune.nn.autocast import in_autocast
from kerneltune.nn.delayed import DelayedScaling
from kerneltune.nn.experts_mm import ExpertWeights, fp8_experts_mm
from kerneltune.nn.grouped_mm import fp8_grouped_mm
from kerneltune.nn.kept_weights import KeptWeights
from kerneltune.nn.permuted_mm import fp8_permuted_mm
from kerneltune.nn.recipes import Recipe
from kerneltune.nn.routing import Routing, permute_tokens


class ConvertedProducts(nn.Module):
    """Hold the recipe of a converted module and the scaling state of each of its weights.

    A child module of the converted module, named `fp8`, so that it moves, prints and is saved with it.

    Args:
        recipe: a Recipe, or `delayed`.
        weights: parameters (E, …) of three axes, by name.

    Attributes:
        recipe: a Recipe, or `delayed`.
        module: name of the converted module, for messages.
        weights: names of the parameters.
        multiplied: names of the weights with which the watched forward pass under way has multiplied in fp8; None outside of such
            a pass. Families' own forward passes never set it, because torch.compile guards on a set that a forward pass changes.
    """

    def __init__(self, recipe: Recipe | str, weights: dict[str, Tensor], module: str) -> None:
        super().__init__()
        self.recipe = recipe
        self.module, self.weights = module, tuple(weights)
        self.multiplied: set[str] | None = None
        for name, weight in weights.items():
            local = local_part(weight)
            if recipe == "delayed":
                self.add_module(f"{name}_scaling", DelayedScaling(local.shape[0], device=local.device))
            self.add_module(f"{name}_kept", KeptWeights(local.shape[0], local.device))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let a forward pass see the weights as `ExpertOperand`, and check that it multiplies by each of them.

        Raises:
            ValueError: the forward pass has not multiplied by each of the weights in fp8.
        """
        multiplied: set[str] = set()  # torch.compile does not trace set[str]()
        self.multiplied = multiplied
        try:
            yield
        finally:
            self.multiplied = None
        missing = [name for name in self.weights if name not in multiplied]
        if missing:
            raise ValueError(
                f"{self.module} was converted, but its forward pass makes no grouped or batched product with its expert weights "
                f"{', '.join(missing)}: leave it out by filter_fn"
            )

    def grouped(self, rows: Tensor, weight: Tensor, offs: Tensor, name: str) -> Tensor:
        """Multiply rows (M, K) in groups that end at offs (E,) with weight (E, K, N), of either order.

        Args:
            name: of the parameter that the weight was made of.
        """
        how, weight, options = self._prepared(weight, name)
        try:
            return fp8_grouped_mm(row_major(in_autocast(rows)), weight, offs, recipe=how, **options)
        except ValueError as error:
            raise ValueError(f"{self.module}.{name}: {error}") from None

    def routed(self, tokens: Tensor, weight: Tensor, routing: Routing, name: str) -> Tensor:
        """Multiply tokens (T, K), copied to their experts, with weight (E, K, N), of either order.

        Args:
            name: of the parameter that the weight was made of.
        """
        if not isinstance(self.recipe, Recipe) or self.recipe.scaling != "tensorwise":
            return self.grouped(permute_tokens(in_autocast(tokens), routing), weight, routing.offs, name)
        how, weight, options = self._prepared(weight, name)
        try:
            return fp8_permuted_mm(row_major(in_autocast(tokens)), weight, routing, how, **options)
        except ValueError as error:
            raise ValueError(f"{self.module}.{name}: {error}") from None

    @property
    def takes_swiglu(self) -> bool:
        """Return whether `gated_experts` runs experts by this recipe."""
        return isinstance(self.recipe, Recipe) and self.recipe.scaling == "tensorwise" and self.recipe.pow2

    def gated_experts(self, tokens: Tensor, up: tuple[str, Tensor], down: tuple[str, Tensor], routing: Routing) -> Tensor:
        """Send tokens (T, K) through experts: multiply with up (E, K, 2I), gate by SwiGLU, multiply with down (E, I, N).

        Args:
            up, down: the name of the parameter that a weight was made of, and the weight, of either order.
        """
        (how, w, kept_w), (_, v, kept_v) = (self._prepared(weight, name) for name, weight in (up, down))
        try:
            return fp8_experts_mm(
                row_major(in_autocast(tokens)), ExpertWeights(w, **kept_w), ExpertWeights(v, **kept_v), routing, how
            )
        except ValueError as error:
            raise ValueError(f"{self.module}.{up[0]}, {down[0]}: {error}") from None

    def _prepared(self, weight: Tensor, name: str) -> tuple[Any, Tensor, dict[str, Any]]:
        """Return the recipe or scaling, the weight in an order that products take, and what is kept of its casts."""
        kept: Any = getattr(self, f"{name}_kept")
        how = self.recipe if isinstance(self.recipe, Recipe) else getattr(self, f"{name}_scaling")
        weight = weight if weight.is_contiguous() or weight.mT.is_contiguous() else weight.contiguous()
        weights = kept.weights(weight, how)
        fits = weights is None and weight.shape[0] == kept.amax.shape[0]
        return how, weight, {"weights": weights, "amax": kept.amax if fits else None}

    def batched(self, batches: Tensor, weight: Tensor, name: str) -> Tensor:
        """Multiply batches (E, m, K) with weight (E, K, N)."""
        E, m, K = batches.shape
        offs = torch.arange(1, E + 1, device=batches.device, dtype=torch.int32) * m
        return self.grouped(batches.reshape(E * m, K), weight, offs, name).view(E, m, weight.shape[2])

    def extra_repr(self) -> str:
        """Return the recipe, for `print(module)`."""
        return f"recipe={self.recipe}"


def local_part(parameter: Tensor) -> Tensor:
    """Return the local part of a DTensor, or another tensor as it is."""
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local


class ExpertOperand(Tensor):
    """A converted module's expert weight as its own forward sees it: grouped and batched products with it run in fp8.

    What is made of it by other functions and has three axes stays such a weight; all else is a plain tensor.
    """

    fp8_products: ConvertedProducts
    product_name: str

    @staticmethod
    def of(parameter: Tensor, products: ConvertedProducts, name: str) -> "ExpertOperand":
        """Return an alias of a parameter, or of the local part of a DTensor, that gradients flow through."""
        return _marked(local_part(parameter), products, name)

    def to_local(self) -> "ExpertOperand":
        """Return itself, as code for DTensors asks for."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch's, grouped and batched products with the weight as second operand in fp8."""
        kwargs = kwargs or {}
        # tuples, because torch.compile does not find functions in a dict
        product = _grouped if func in _GROUPED_PRODUCTS else _batched if func in _BATCHED_PRODUCTS else None
        if product is not None:
            operands = [*args, *(kwargs[name] for name in _OPERANDS if name in kwargs)]
            options = {name: value for name, value in kwargs.items() if name not in _OPERANDS}
            is_by_weight = len(operands) > 1 and isinstance(operands[1], cls) and not isinstance(operands[0], cls)
            made = product(*operands, **options) if is_by_weight else None
            if made is not None:
                multiplied = operands[1].fp8_products.multiplied
                if multiplied is not None:
                    multiplied.add(operands[1].product_name)
                return made
        with plain_tensors():
            out = func(*args, **kwargs)
        first = args[0][0] if args and isinstance(args[0], list | tuple) and args[0] else args[0] if args else None
        if not isinstance(first, cls):
            return out
        if isinstance(out, tuple | list):
            return type(out)(_kept(t, first) for t in out) if type(out) in (tuple, list) else out
        return _kept(out, first)


def _marked(plain: Tensor, products: ConvertedProducts, name: str) -> ExpertOperand:
    operand = plain.as_subclass(ExpertOperand)
    operand.fp8_products, operand.product_name = products, name
    return operand


def _kept(out: Any, source: ExpertOperand) -> Any:
    if not isinstance(out, Tensor) or out.ndim != 3 or out.layout != torch.strided:
        return out
    return _marked(out, source.fp8_products, source.product_name)


def _plain(operand: ExpertOperand) -> Tensor:
    with plain_tensors():
        return operand.view(operand.shape)  # torch.compile does not trace `as_subclass(Tensor)`


def _grouped(
    a: Tensor,
    b: ExpertOperand,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:
    if offs is None:
        return _batched(a, b) if bias is None and a.ndim == 3 else None
    if a.ndim != 2 or b.ndim != 3:
        return None
    y = b.fp8_products.grouped(a, _plain(b), offs, b.product_name)
    y = y if bias is None else y + bias
    return y if out_dtype is None else y.to(out_dtype)


def _batched(a: Tensor, b: ExpertOperand) -> Tensor | None:
    if a.ndim != 3 or b.ndim != 3 or a.shape[0] != b.shape[0]:
        return None
    return b.fp8_products.batched(a, _plain(b), b.product_name)


_GROUPED_PRODUCTS = (grouped_mm, nn.functional.grouped_mm)
_BATCHED_PRODUCTS = (torch.bmm, Tensor.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__)
_OPERANDS = ("input", "self", "mat_a", "mat2", "other", "mat_b")
"""Names of the first operand of these products, then of the second."""
