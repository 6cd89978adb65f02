"""Convert modules to fp8: a module gets a subclass whose products run in fp8, and a child `fp8` with their state.

Conversion gives a module a child `fp8`, the `ConvertedProducts`, and a class with two bases: a kind, which is a subclass of
`Converted`, and the module's own class. `FusedExperts` and `GroupedExperts` have forward passes of this package.
`UnknownExperts` runs the module's own forward pass, which sees the expert weights as `ExpertOperand`.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kerneltune.compat import (
    apply_gate,
    grouped_mm,
    has_default_gate,
    has_own_gate,
    in_backward,
    is_gated_experts,
    own_parameter,
    plain_tensors,
    untraced,
)
from kerneltune.nn.alignment import row_major
from kerneltune.nn.delayed import LayerScaling
from kerneltune.nn.forward_pass import computes_swiglu, names_in_forward
from kerneltune.nn.fp8_linear import Fp8Linear, GroupedLinear, why_no_product
from kerneltune.nn.grouped_mm import fp8_grouped_mm, fp8_routed_mm, in_autocast
from kerneltune.nn.kept_weights import KeptWeights
from kerneltune.nn.recipes import Recipe
from kerneltune.nn.routing import Routing, permute_tokens, sort_tokens, unpermute_tokens
from kerneltune.nn.swiglu import is_plain_silu, swiglu
from kerneltune.rounding import ALIGNED


class ConvertedProducts(nn.Module):
    """Multiply by the weights of a converted module, and hold the recipe and the scaling state of each weight.

    A child module of the converted module, named `fp8`, so that it moves, prints and is saved with it.

    Args:
        recipe: a Recipe, or `delayed`.
        weights: parameters (E, …) of three axes, by name.
        module: name of the converted module, for messages.

    Attributes:
        multiplied: names of the weights with which the watched forward pass under way has multiplied in fp8; None outside of
            the pass. Forward passes of this package never set it, because torch.compile guards on a set that a forward pass
            changes.
    """

    def __init__(self, recipe: Recipe | str, weights: dict[str, Tensor], module: str) -> None:
        super().__init__()
        self.recipe = recipe
        self.module, self.weights = module, tuple(weights)
        self.multiplied: set[str] | None = None
        for name, weight in weights.items():
            local = local_part(weight)
            if recipe == "delayed":
                self.add_module(f"{name}_scaling", LayerScaling(local.shape[0], device=local.device))
            self.add_module(f"{name}_kept", KeptWeights(local.shape[0], local.device))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Give a forward pass the weights as `ExpertOperand`, and check that the pass multiplies by every weight in fp8."""
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
        """Multiply rows (M, K) in groups that end at offs (E,) with a weight (E, K, N), row-major or column-major."""
        kept: Any = getattr(self, f"{name}_kept")
        recipe = self.recipe if isinstance(self.recipe, Recipe) else getattr(self, f"{name}_scaling").on(rows.device)
        rows = row_major(in_autocast(rows))
        return self._named(name, fp8_grouped_mm, rows, _in_order(weight), offs, recipe=recipe, weights=kept)

    def routed(self, tokens: Tensor, weights: dict[str, Tensor], routing: Routing) -> Tensor:
        """Multiply tokens (T, K), copied to their experts, with a weight (E, K, N); after SwiGLU with a second weight, if given.

        weights: weights of either order, by the names of their parameters; two only where `has_swiglu`.
        """
        if not isinstance(self.recipe, Recipe) or self.recipe.is_rowwise:
            ((name, weight),) = weights.items()
            return self.grouped(permute_tokens(in_autocast(tokens), routing), weight, routing.offs, name)
        matrices, kept = [_in_order(w) for w in weights.values()], [getattr(self, f"{name}_kept") for name in weights]
        rows = row_major(in_autocast(tokens))
        return self._named(", ".join(weights), fp8_routed_mm, rows, matrices, routing, self.recipe, weights=kept)

    @property
    def has_swiglu(self) -> bool:
        """Return whether experts with SwiGLU run as one function under the recipe."""
        return isinstance(self.recipe, Recipe) and not self.recipe.is_rowwise and self.recipe.pow2

    def _named(self, names: str, function: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        """Call a product; its ValueError names the module and the parameters."""
        try:
            return function(*args, **options)
        except ValueError as error:
            raise ValueError(f"{self.module}.{names}: {error}") from None

    def extra_repr(self) -> str:
        """Return the recipe, for `print(module)`."""
        return f"recipe={self.recipe}"


def _in_order(weight: Tensor) -> Tensor:
    """Return a weight (E, K, N) in an order that products support."""
    return weight if weight.is_contiguous() or weight.mT.is_contiguous() else weight.contiguous()


def local_part(parameter: Tensor) -> Tensor:
    """Return the local part of a DTensor, or another tensor as it is."""
    local: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local


class ExpertOperand(Tensor):
    """Stand for an expert weight in a converted module's own forward pass: grouped and batched products by it run in fp8.

    Any other function of torch returns an `ExpertOperand` if its result has three axes, and else a plain tensor.
    """

    fp8_products: ConvertedProducts
    product_name: str

    def to_local(self) -> "ExpertOperand":
        """Return the operand itself, for forward passes that call `to_local` of a DTensor."""
        return self

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of torch; grouped and batched products with the weight as the second operand run in fp8."""
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            operands = [*args, *(kwargs[name] for name in _OPERANDS if name in kwargs)]
            options = {name: value for name, value in kwargs.items() if name not in _OPERANDS}
            is_by_weight = len(operands) > 1 and isinstance(operands[1], cls) and not isinstance(operands[0], cls)
            made = _product_by_operand(*operands, **options) if is_by_weight and "out" not in options else None
            if made is not None:
                return made
        with plain_tensors():
            out = func(*args, **kwargs)
        first = args[0][0] if args and isinstance(args[0], list | tuple) and args[0] else args[0] if args else None
        if not isinstance(first, cls):
            return out
        products, name = first.fp8_products, first.product_name
        if type(out) in (tuple, list):
            return type(out)(_operand(t, products, name) for t in out)
        return _operand(out, products, name)


# a tuple, because torch.compile does not find functions in a dict
_PRODUCTS = (grouped_mm, F.grouped_mm, torch.bmm, Tensor.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__)
_NAMES_OF_PRODUCTS = {"@", "bmm", "matmul", "_grouped_mm", "grouped_mm"}
_OPERANDS = ("input", "self", "mat_a", "mat2", "other", "mat_b")
"""Names of the first operand of these products, then of the second."""


def _product_by_operand(
    a: Tensor,
    b: ExpertOperand,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor | None:
    """Multiply rows (M, K) in groups that end at offs, or batches (E, m, K), in fp8; None for a product of other shapes."""
    is_batched = offs is None and bias is None and a.ndim == 3 and a.shape[0] == b.shape[0]
    if b.ndim != 3 or not (is_batched or (offs is not None and a.ndim == 2)):
        return None
    products, name = b.fp8_products, b.product_name
    if products.multiplied is not None:
        products.multiplied.add(name)
    with plain_tensors():
        weight = b.view(b.shape)  # torch.compile does not trace `as_subclass(Tensor)`
    if offs is None:
        E, m, K = a.shape
        ends = torch.arange(1, E + 1, device=a.device, dtype=torch.int32) * m
        y = products.grouped(a.reshape(E * m, K), weight, ends, name).view(E, m, weight.shape[2])
    else:
        y = products.grouped(a, weight, offs, name)
    y = y if bias is None else y + bias
    return y if out_dtype is None else y.to(out_dtype)


def _operand(value: Any, products: ConvertedProducts, name: str) -> Any:
    """Return an alias of a tensor of three axes that gradients flow through, or any other value as it is."""
    if not isinstance(value, Tensor) or value.ndim != 3 or value.layout != torch.strided:
        return value
    operand = value.as_subclass(ExpertOperand)
    operand.fp8_products, operand.product_name = products, name
    return operand


class Converted:
    """Mark the classes that conversion makes, and pickle their modules by the two bases.

    A kind defines `forward` and names that begin with `fp8`, because any other name could hide a parameter of the module.

    Attributes:
        fp8_operands: names of parameters that a forward pass sees as `ExpertOperand`, each with its name in
            `ConvertedProducts`.
    """

    fp8_operands: tuple[tuple[str, str], ...]

    @staticmethod
    def fp8_is_member(module: nn.Module) -> bool:
        """Return whether conversion gives a module this kind."""
        return True

    @staticmethod
    def fp8_weights(module: Any) -> dict[str, Tensor]:
        """Return the parameters (E, N, K) of a module, converted or not, and of containers in it, such as a ParameterList."""
        if not _has_forward(module) or isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            return {}
        return {prefix + name: p for prefix, part in _named_parts(module) for name, p in _expert_parameters(part)}

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = type(self)
        if not _is_made(made):
            return super().__reduce_ex__(protocol)
        return _empty, (*made.__bases__, made.fp8_operands), cast(Any, self).__getstate__()


class FusedExperts(Converted):
    """Run experts of `transformers`, whatever their `experts_implementation` is."""

    fp8_is_member = staticmethod(is_gated_experts)

    @staticmethod
    def fp8_weights(module: Any) -> dict[str, Tensor]:
        """Return the weights in the order of their products."""
        return {name: getattr(module, name) for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")}

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send tokens (T, H) through the experts (T, k) that the router chose and weighs by (T, k); return (T, H) of their type.

        An expert of another rank is out of range, as the library marks it, and has weight 0.
        """
        up, down = weights = self.fp8_weights(self)
        routing = sort_tokens(top_k_index, getattr(self, up).shape[0])
        products: ConvertedProducts = self.fp8
        is_plain = self.has_gate and self.fp8_has_default_gate and not has_own_gate(self)
        has_swiglu = is_plain and is_plain_silu(self.act_fn)
        w, v = [w if self.is_transposed else w.transpose(1, 2) for w in map(local_part, weights.values())]
        if has_swiglu and not self.has_bias and products.has_swiglu:
            x = products.routed(hidden_states, {up: w, down: v}, routing)
        else:
            x = _with_bias(self, up, products.routed(hidden_states, {up: w}, routing), routing.offs)
            x = swiglu(x) if has_swiglu else apply_gate(self, x) if self.has_gate else self.act_fn(x)
            x = _with_bias(self, down, products.grouped(x, v, routing.offs, down), routing.offs)
        return unpermute_tokens(x, routing, top_k_weights).to(hidden_states.dtype)


def _with_bias(module: Any, name: str, y: Tensor, offs: Tensor) -> Tensor:
    if not module.has_bias:
        return y
    rows = torch.arange(y.shape[0], device=offs.device, dtype=offs.dtype)
    bias = local_part(getattr(module, f"{name}_bias"))
    return y + bias[torch.searchsorted(offs, rows, right=True).clamp_(max=offs.shape[0] - 1)].to(y.dtype)


class GroupedExperts(Converted):
    """Run torchtitan's grouped experts."""

    @staticmethod
    def fp8_is_member(module: nn.Module) -> bool:
        """Return whether a module has w1, w2 and w3 alone, and a forward of x and num_tokens_per_expert that computes SwiGLU."""
        weights = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if weights.keys() != {"w1", "w2", "w3"} or any(w.ndim != 3 for w in weights.values()):
            return False
        if list(inspect.signature(type(module).forward).parameters)[1:] != ["x", "num_tokens_per_expert"]:
            return False
        return computes_swiglu(module, weights["w1"].shape[0])

    @staticmethod
    def fp8_weights(module: Any) -> dict[str, Tensor]:
        """Return gate, down and up."""
        return {"w1": module.w1, "w2": module.w2, "w3": module.w3}

    def forward(self: Any, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Send rows x (M, K), sorted by expert, through their experts; return (M, K) of x's type.

        Rows beyond the (E,) counted rows become 0, as token dispatchers pad.
        """
        products: ConvertedProducts = self.fp8
        w1, w2, w3 = (local_part(w).transpose(1, 2) for w in (self.w1, self.w2, self.w3))
        ends = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        is_counted = torch.arange(x.shape[0], device=x.device)[:, None] < ends[-1]
        offs = torch.cat([ends[:-1], torch.full_like(ends[:1], x.shape[0])])
        rows = torch.where(is_counted, x, 0).bfloat16()
        hidden = F.silu(products.grouped(rows, w1, offs, "w1")) * products.grouped(rows, w3, offs, "w3")
        return products.grouped(hidden, w2, offs, "w2").to(x.dtype)


def _expert_parameters(part: nn.Module) -> list[tuple[str, Tensor]]:
    own = part.named_parameters(recurse=False, remove_duplicate=False)
    return [(name, p) for name, p in own if p.ndim == 3 and p.shape[0] > 1 and min(p.shape[1:]) >= ALIGNED]


def _has_forward(module: nn.Module) -> bool:
    """Return whether a module has a forward pass other than those of torch; containers have none."""
    return not getattr(_forward_of(module), "__module__", "torch.").startswith("torch.")


def _forward_of(module: nn.Module) -> Any:
    """Return the forward pass of a module's class; None for a script of torch.jit."""
    return getattr(type(module), "forward", None)


def _named_parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and its containers without a forward of their own, such as a ParameterList, with prefixes for names."""
    yield prefix, module
    for name, child in module.named_children():
        if _forward_of(child) is nn.Module.forward and not isinstance(child, ConvertedProducts):
            yield from _named_parts(child, f"{prefix}{name}_")


def has_matrix(module: nn.Module) -> bool:
    """Return whether a module with a forward pass holds a parameter of two axes or more, also in its containers."""
    if _forward_of(module) is nn.Module.forward:
        return False
    return any(sum(n > 1 for n in p.shape) > 1 for _, part in _named_parts(module) for p in part.parameters(recurse=False))


class UnknownExperts(Converted):
    """Run a module's own forward pass, to which the parameters in `fp8_operands` are `ExpertOperand`."""


_KINDS: tuple[type[Converted], ...] = (FusedExperts, GroupedExperts, UnknownExperts)


def _kind_of(module: nn.Module) -> type[Converted]:
    """Return the kind of a module, converted or not."""
    is_converted = isinstance(module, Converted)
    return next(kind for kind in _KINDS if (isinstance(module, kind) if is_converted else kind.fp8_is_member(module)))


def why_not_experts(module: nn.Module) -> str | None:
    """Return why a module with expert weights cannot multiply by them in fp8, or None."""
    if not isinstance(module, GroupedLinear | Converted):
        if _kind_of(module) is UnknownExperts and _NAMES_OF_PRODUCTS.isdisjoint(names_in_forward(module)):
            return (
                f"the code of {type(module).__name__}.forward makes no grouped or batched product with its weights of three axes"
            )
        if "forward" in vars(module):
            return "a forward set on the object, as hooks of accelerate are: convert before that"
        if hasattr(module, "fp8"):
            return "an attribute `fp8`, which conversion needs: rename it"
    names = [prefix + name for prefix, part in _named_parts(module) for name, _ in _expert_parameters(part)]
    if twice := [name for name in names if names.count(name) > 1]:
        return f"two expert weights that would both be called {twice[0]}: rename one"
    weights = expert_weights(module)
    devices = {str(weight.device) for weight in weights.values()}
    other_devices = f"weights must be on one device, got {', '.join(sorted(devices))}" if len(devices) > 1 else None
    return next(filter(None, itertools.starmap(why_no_product, weights.items())), other_devices)


def expert_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own expert weights (E, N, K) by name."""
    return {"weight": module.weight} if isinstance(module, GroupedLinear) else _kind_of(module).fp8_weights(module)


def _is_made(cls: type) -> bool:
    """Return whether conversion made a class; a subclass that `fully_shard` makes of the class does not count."""
    return "fp8_operands" in vars(cls)


def _empty(kind: Any, base: Any, operands: tuple[tuple[str, str], ...]) -> nn.Module:
    """Return a converted module without state, for unpickling and copies."""
    cls = _made_class(kind, base, operands)
    return cls.__new__(cls)


@cache
def _made_class(kind: Any, base: Any, operands: tuple[tuple[str, str], ...]) -> type[nn.Module]:
    """Return the class of a kind and a base: the same for all modules, so that they share compiled code."""
    members: dict[str, Any] = {attribute: _operand_property(attribute, name) for attribute, name in operands}
    members |= {"fp8_operands": operands, "fp8_has_default_gate": has_default_gate(base)}
    if kind is UnknownExperts and base.forward is not nn.Module.forward:
        members["forward"] = _checked(base.forward)
    return type(f"Fp8{base.__name__}", (kind, base), members)


def _operand_property(attribute: str, name: str) -> property:
    def get(self: Any) -> Any:
        parameter = own_parameter(self, attribute)
        in_forward = self.fp8.multiplied is not None or in_backward()
        return _operand(local_part(parameter), self.fp8, name) if in_forward else parameter

    return property(get)


def _checked(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.fp8.watched():
            return forward(self, *args, **kwargs)

    # torch.compile does not ask a tensor subclass about torch._grouped_mm, and would go on in bf16
    names = forward.__code__.co_names
    return checked if "bmm" in names and "_grouped_mm" not in names else untraced(checked)


def is_converted(module: nn.Module) -> bool:
    """Return whether a module multiplies in fp8 because it was converted."""
    if isinstance(module, GroupedLinear):
        return module.recipe is not None
    # `convert_module` writes `fp8` into vars() of the parts of a converted module; of the module itself `fp8` is a child module.
    return isinstance(module, Fp8Linear) or (isinstance(module, Converted) and "fp8" not in vars(module))


def convert_module(module: Any, name: str, recipe: Recipe | str) -> None:
    """Let a linear layer, or a module with expert weights, multiply in fp8, in place; messages name the module."""
    if isinstance(module, GroupedLinear):
        module.set_recipe(recipe)
        return
    weights = expert_weights(module)
    if not weights:
        Fp8Linear.from_linear(module, recipe)
        return
    module.fp8 = ConvertedProducts(recipe, weights, name or type(module).__name__)
    kind: Any = _kind_of(module)
    for prefix, part in list(_named_parts(module)):
        names = [attribute for attribute, _ in _expert_parameters(part)] if kind is UnknownExperts else []
        if part is not module and names:
            vars(part)["fp8"] = module.fp8  # not a child of the part, so that state_dict() has it once
        if (part is module or names) and not isinstance(part, Converted):
            part.__class__ = _made_class(kind, cast(Any, type(part)), tuple((name, prefix + name) for name in names))


def why_not_reverted(module: nn.Module) -> str | None:
    """Return why a converted module cannot be changed back, or None."""
    if "forward" in vars(module):
        return "has a forward set on the object"
    if isinstance(module, GroupedLinear) or type(module) is Fp8Linear or _is_made(type(module)):
        return None
    return f"is a {type(module).__name__}"


def revert(module: nn.Module) -> None:
    """Let a converted module multiply as it did before."""
    if isinstance(module, GroupedLinear):
        module.set_recipe(None)
        return
    if isinstance(module, Fp8Linear):
        module.to_linear()
        return
    for _, part in list(_named_parts(module)):
        if _is_made(type(part)):
            part.__class__ = type(part).__bases__[1]
            vars(part).pop("fp8", None)
    if hasattr(module, "fp8"):
        del module.fp8
