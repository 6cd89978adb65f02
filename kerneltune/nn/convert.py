"""Convert existing models to fp8 training in one call, and back."""

import re
import warnings
from collections.abc import Callable, Iterable

from torch import nn

from kerneltune.compat import is_compiled
from kerneltune.kernel_lib.arguments import DTYPE_NAMES
from kerneltune.nn.alignment import ALIGNED
from kerneltune.nn.candidates import Reasons, experts_of, feeding_norms, linears_of
from kerneltune.nn.converted import (
    Converted,
    change_class,
    convert_experts,
    expert_weights,
    is_converted,
    revert,
    why_not_reverted,
)
from kerneltune.nn.fp8_linear import Fp8Linear
from kerneltune.nn.grouped_linear import GroupedLinear
from kerneltune.nn.recipes import Recipe, recipe_of

Filter = Callable[[nn.Module, str], bool]

_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def _folded(names: Iterable[str]) -> str:
    """Return the names in a line; names that differ in numbers alone become one pattern with their count: `layers.*.mlp (61)`."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(_NUMBER.sub(".*", name), []).append(name or "the model itself")
    return ", ".join(f"{kind} ({len(same)})" if len(same) > 1 else same[0] for kind, same in kinds.items())


def _folded_reasons(skipped: dict[str, str]) -> list[str]:
    """Return a line `names: reason` for each reason and name pattern of the skipped modules."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, reason in skipped.items():
        kinds.setdefault((_NUMBER.sub(".*", name), reason), []).append(name)
    return [f"{_folded(names)}: {reason}" for (_, reason), names in kinds.items()]


class Conversion(list[str]):
    """Names of the converted modules.

    Attributes:
        skipped: module name to the reason why the module stays as it was.
        notes: a line for each surprise, which is also a UserWarning: modules that were in fp8 or compiled before.
    """

    def __init__(self, converted: list[str], skipped: dict[str, str], notes: list[str]) -> None:
        super().__init__(converted)
        self.skipped, self.notes = skipped, notes

    def __str__(self) -> str:
        """Return a line with the converted modules, the notes, and a line for each kind of skipped modules."""
        skipped = (f"skipped {line}" for line in _folded_reasons(self.skipped))
        return "\n".join([f"converted {len(self)} modules to fp8: {_folded(self)}", *self.notes, *skipped])


def convert_to_fp8_training(
    model: nn.Module,
    recipe: str | Recipe = "tensorwise",
    *,
    experts: bool = True,
    dense: bool = False,
    norms: bool = False,
    filter_fn: Filter | None = None,
) -> Conversion:
    """Let the expert layers of a model, and its dense layers, multiply in fp8 from now on, in place: forward and backward.

    - A GroupedLinear takes the recipe.
    - An expert module of `transformers` runs in fp8 whatever its `experts_implementation` is, and so do torchtitan's grouped
      experts with w1, w2 and w3.
    - Any other module with expert weights of its own, which are parameters of three axes, also in a ParameterList, sees them as
      tensors whose grouped and batched products (`torch._grouped_mm`, `torch.bmm`, `torch.matmul`) run in fp8. It is skipped
      where the code of its forward pass names no such product. A forward pass that makes none with one of the weights raises a
      ValueError: nothing stays in bf16 unnoticed.
    - With `dense`, an `nn.Linear` becomes an `Fp8Linear`, where that pays. Output layers and routers stay.
    - With `norms`, RMS normalizations of known decoder layers write the fp8 operands of the linear layers that alone read them;
      their own result is NaN. Such a layer is compiled as a whole or not at all.

    Groups may have any size. Parameters, their names and all hooks stay. The forward passes compile without a graph break, but
    for `delayed` and modules of other kinds that call `torch._grouped_mm`. Activation checkpoints may be anywhere. Converted
    modules can be copied and pickled. `revert_from_fp8_training` undoes it.

    Args:
        model: to convert, itself included.
        recipe: `tensorwise`, `rowwise`, `delayed` or a Recipe. `delayed` needs `update_scales` once per optimizer step.
        experts: whether to convert expert layers.
        dense: whether to convert linear layers.
        norms: whether normalizations feed linear layers, which takes `dense` and tensorwise scaling.
        filter_fn: (module, its name in the model) -> whether to convert it; None converts all. Only asked about candidates.

    Returns:
        The names of the converted modules, and what was skipped and why.

    Raises:
        ValueError: no module, a parameter without a shape, an unknown recipe, nothing to convert, or an expert weight that no
            product can take; the model stays as it is.
    """
    _check_model(model)
    for name, p in model.named_parameters():
        if isinstance(p, nn.UninitializedParameter):
            raise ValueError(f"{name} has no shape before the model's first forward pass: convert after that")
    fresh: Recipe | str = "delayed" if recipe == "delayed" else recipe_of(recipe, "delayed")
    if norms and not dense:
        raise ValueError("norms=True takes dense=True: normalizations feed linear layers that multiply in fp8")
    skipped: dict[str, str] = {}
    layers = _chosen(experts_of(model), filter_fn, skipped) if experts else {}
    linears = _chosen(linears_of(model), filter_fn, skipped) if dense else {}
    if not layers and not linears:
        named = {name or type(model).__name__: reason for name, reason in skipped.items()}
        raise ValueError(
            f"{type(model).__name__} has no {_wanted(experts, dense)} that were to be converted; "
            f"skipped: {'; '.join(_folded_reasons(named)) or 'nothing'}"
        )
    for name, module in layers.items():
        _check(module, name)
    notes = _notes(model, layers | linears, fresh)
    for name, module in layers.items():
        convert_experts(module, name, fresh)
    for linear in linears.values():
        Fp8Linear.from_linear(linear, fresh)  # type: ignore[arg-type]
    feeding = _chosen(feeding_norms(model), filter_fn, skipped) if norms else {}
    for norm in feeding.values():
        change_class(norm, "norm")
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return Conversion([*layers, *linears, *feeding], skipped, notes)


def _notes(model: nn.Module, chosen: dict[str, nn.Module], recipe: Recipe | str) -> list[str]:
    """Return a line for the chosen modules that are in fp8 already, and a line for the compiled modules of the model."""
    again = [n for n, m in chosen.items() if is_converted(m) and not (isinstance(m, GroupedLinear) and m.recipe == recipe)]
    compiled = [name for name, module in model.named_modules() if is_compiled(module)]
    notes = [f"in fp8 already, with the recipe {recipe} from now on: {_folded(again)}"] if again else []
    why = "compiled before the conversion, compiles again at the next call"
    return notes + ([f"{why}: {_folded(compiled)}"] if compiled else [])


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")


def _chosen(found: Reasons, filter_fn: Filter | None, skipped: dict[str, str]) -> dict[str, nn.Module]:
    """Return the modules to convert, and add the reasons for the others to `skipped`."""
    chosen = {}
    for name, (module, reason) in found.items():
        why = "left out by filter_fn" if reason is None and filter_fn is not None and not filter_fn(module, name) else reason
        if why is None:
            chosen[name] = module
        else:
            skipped[name] = why
    return chosen


def _wanted(experts: bool, dense: bool) -> str:
    parts = ["expert weights, parameters of three axes,"] * experts + ["linear layers for which fp8 pays"] * dense
    return " or ".join(parts) or "kind of layers"


def _check(module: nn.Module, name: str) -> None:
    """Raise a ValueError that names a module with a weight that fp8 products cannot take."""
    where = name or type(module).__name__
    devices = set()
    for weight_name, weight in expert_weights(module).items():
        E, N, K = weight.shape
        if not E or N % ALIGNED or K % ALIGNED or not N or not K:
            raise ValueError(f"{where}.{weight_name} must be (E, N, K), N and K multiples of {ALIGNED}, got {(E, N, K)}")
        if weight.dtype not in DTYPE_NAMES:
            raise ValueError(f"{where}.{weight_name} must be one of {', '.join(DTYPE_NAMES.values())}, got {weight.dtype}")
        devices.add(weight.device)
    if len(devices) > 1:
        raise ValueError(f"{where} must have its weights on one device, got {', '.join(sorted(map(str, devices)))}")
    if isinstance(module, GroupedLinear | Converted):
        return
    if "forward" in vars(module):
        raise ValueError(f"{where} has a forward set on the object, as hooks of accelerate are: convert before that")
    if hasattr(module, "fp8"):
        raise ValueError(f"{where} already has an attribute `fp8`, which conversion takes: rename it")


def revert_from_fp8_training(model: nn.Module) -> list[str]:
    """Let every converted module of a model multiply as it did before, in place.

    A GroupedLinear that was converted multiplies in the type of its input from now on.

    Returns:
        The names of the reverted modules; empty where none is converted.

    Raises:
        ValueError: no module; or a converted module became another class's since, as `fully_shard` makes it, or has a forward
            set on the object. The model stays as it is.
    """
    _check_model(model)
    found = {n: m for n, m in model.named_modules() if is_converted(m)}
    for name, module in found.items():
        if (why := why_not_reverted(module)) is not None:
            raise ValueError(f"{name or 'the model'} {why} since it was converted: revert before that")
    for module in found.values():
        revert(module)
    return list(found)
