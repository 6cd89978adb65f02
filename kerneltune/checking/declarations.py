"""Judge declarations of an operator for a case: the bytes of `traffic`, the operations of `flops`, inputs that are seeds."""

import itertools
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kerneltune.checking.check import Checker, have_same_bits
from kerneltune.checking.consistency import holds_integers
from kerneltune.checking.dispatch import Calls
from kerneltune.interpreter.races import touching
from kerneltune.spec import Case, Config, Op, Variant

_NEAR_TRAFFIC = 1.25
"""Largest factor between the declared bytes of `traffic` and the bytes of accesses: small tensors may be left out."""
_NEAR_FLOPS = 1.4
"""Largest factor between the declared `flops` and the products of the reference: operations of elements may count."""
_FIRST_OPERAND = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1, "convolution": 1}
"""Products of torch -> place of the operand whose last axis, or whose filter, a product sums over."""
_CHOOSING = {"where", "masked_fill", "tril", "triu", "_softmax", "exp", "gather", "index", "index_select", "scatter"}
"""Functions of references that may compute more products than they need, for example in causal attention."""
_UNCOUNTED = ("attention", "_int_mm", "_scaled", "convolution_backward", "lstm", "gru")


def wrong_traffic(checker: Checker, variant: Variant, config: Config) -> list[str]:
    """Return a text for bytes that `traffic` counts far too low for the kernels' accesses, or too high for all tensors."""
    with touching() as touched:
        outputs = checker.outputs(variant, config)
    declared, texts = checker.op.traffic(checker.case), list[str]()
    for what, values, given in (("load", checker.inputs, declared.read), ("store", outputs, declared.write)):
        leaves = tree_leaves(dict(values))
        if any(not isinstance(leaf, torch.Tensor | complex | float | int | str | torch.dtype | None) for leaf in leaves):
            continue  # such as a dataclass, which may hold tensors
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        accessed = sum(int(touched[key].sum()) for key in itertools.product([what], storages) if key in touched)
        whole = sum(tensor.nbytes for tensor in tensors)
        if not accessed / _NEAR_TRAFFIC <= given <= max(whole, accessed) * _NEAR_TRAFFIC:
            side = f"kernels {what} {accessed:,}" if given < accessed else f"all tensors have {whole:,}"
            texts.append(f"{'read' if what == 'load' else 'write'}={given:,} in case {checker.case.name}, and {side}")
    return texts


def wrong_flops(op: Op, case: Case) -> list[str]:
    """Return a text for a `flops` far from the products of the reference; none where the reference computes by other means.

    Products of operands without a negative element may be of magnitudes, for tolerances, and need not be declared.
    """
    declared, products = op.flops(case) if op.flops else 0, _Products()
    try:
        with torch.no_grad(), products:
            op.reference(op.inputs(case, device="cpu"))
    except Exception:  # gradients by autograd, which need further products, or an error that the check of the case names
        return []
    least = products.num_signed if products.names.isdisjoint(_CHOOSING) else 0
    if not declared or not products.num_all or any(part in name for name in products.names for part in _UNCOUNTED):
        return []
    if least / _NEAR_FLOPS <= declared <= products.num_all * _NEAR_FLOPS:
        return []
    return [f"flops={declared:,} in case {case.name}, and products of the reference take {products.num_all:,}"]


class _Products(Calls):
    """Count the operations of products, and of products whose operands have negative elements; note the names of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.num_all = self.num_signed = 0
        self.names = set[str]()

    def call(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call a function, and count its operations."""
        result, name = func(*args, **kwargs), func.overloadpacket.__name__
        self.names.add(name)
        if (place := _FIRST_OPERAND.get(name)) is not None and result.numel():
            summed = args[1][0].numel() if name == "convolution" else args[place].shape[-1]
            operands = (args[0], args[1]) if name == "convolution" else args[place : place + 2]
            self.num_all += (operations := 2 * result.numel() * summed)
            self.num_signed += operations * any(bool((operand < 0).any()) for operand in operands)
        return result


def seeds_without_effect(checker: Checker, variant: Variant, config: Config) -> list[str]:
    """Return a text for each input named a seed whose next value gives the same outputs, as if it were ignored."""
    texts = list[str]()
    for name, value in checker.inputs.items():
        if "seed" in name.lower() and (type(value) is int or (isinstance(value, torch.Tensor) and holds_integers(value.dtype))):
            other = copy(checker)
            other.inputs = {**checker.inputs, name: value + 1}
            other.inputs_before = {kept: before for kept, before in checker.inputs_before.items() if kept != name}
            changed, outputs = other.run(variant, config)[0], checker.outputs(variant, config)
            if changed and all(have_same_bits(it, changed[key]) for key, it in outputs.items() if isinstance(it, torch.Tensor)):
                texts.append(f"{name} + 1 gives the same outputs in case {checker.case.name}: is it ignored?")
    return texts
