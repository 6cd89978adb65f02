"""Check what an operator declares: `traffic`, `flops`, seeds, and the case that a call without `config=` looks up."""

import itertools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from kerneltune.cache import Chooser
from kerneltune.checking.check import Checker, have_same_bits, host_folder
from kerneltune.checking.consistency import holds_integers
from kerneltune.checking.covering import Setting, settings
from kerneltune.checking.dispatch import Calls
from kerneltune.errors import first_line, statement_in
from kerneltune.interpreter.modes import replaced
from kerneltune.interpreter.races import touching
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.task import Outcome

_NEAR_TRAFFIC = 1.25
"""Largest factor between the declared bytes of `traffic` and the bytes of accesses: small tensors may be left out."""
_NEAR_FLOPS = 1.4
"""Largest factor between the declared `flops` and the products of the reference: operations of elements may count."""
_FIRST_OPERAND = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1, "convolution": 1}
"""Products of torch -> place of the operand whose last axis, or whose filter, a product sums over."""
_CHOOSING = {"where", "masked_fill", "tril", "triu", "_softmax", "exp", "gather", "index", "index_select", "scatter"}
"""Functions of references that may compute more products than they need, for example in causal attention."""
_UNCOUNTED = ("attention", "_int_mm", "_scaled", "convolution_backward", "lstm", "gru")
_CALL = "a call without `config=`"


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


def look_up_failures(op: Op, variant: Variant, checkers: Mapping[Case, Checker]) -> list[Outcome]:
    """Return the first failure of `variant.run(inputs, None)`, on a case for each type, mode and value of an option.

    A variant without knobs, a captured kernel, and a `run` that looks nothing up have no failures.
    """
    if variant.config is None or op.kind == "captured":
        return []
    seen = set[Setting]()
    for case in (case for case in checkers if all(case.sizes.values())):
        if not seen.issuperset(settings(case)) and (lines := _errors_of_call(op, variant, case, checkers[case])):
            return [Outcome("failed", line, None, case) for line in lines]
        seen.update(settings(case))
    return []


def _errors_of_call(op: Op, variant: Variant, case: Case, checker: Checker) -> list[str]:
    looked_up: list[Case] = []

    def note(chooser: Chooser, case: Case) -> None:
        if (chooser.op.name, chooser.variant.name) == (op.name, variant.name):
            looked_up.append(case)

    with before_look_ups(note):
        try:
            outputs = checker.outputs(variant, None)
        except Exception as error:  # the author's code may fail in any way
            if not looked_up and Chooser.__name__ not in str(error):  # `run` needs a config, and has no look-up
                return []
            return [f"{_CALL} fails: {statement_in(host_folder(op), error)}{first_line(error)}"]
    tuned = op.case_of_call(case)
    if looked_up and _without_free_options(op, tuned) not in [_without_free_options(op, asked) for asked in looked_up]:
        untold = [name for name, value in tuned.options if (name, value) not in looked_up[0].options]
        hint = f"; an option that no argument of a call tells belongs in free_options: {', '.join(untold)}" if untold else ""
        return [f"{_CALL} looks up {looked_up[0].label}, where configs are stored for {tuned.label}{hint}"]
    return [f"{_CALL}: {line}" for line in checker.disagreements(outputs)] if looked_up else []


def before_look_ups(act: Callable[[Chooser, Case], None]) -> AbstractContextManager[None]:
    """Call a function with the chooser and the case of each look-up within; its exception takes the place of the look-up."""
    choose = Chooser.__call__

    def look_up(chooser: Chooser, *arguments: Any, **named: Any) -> Any:
        try:
            case = Case("", *arguments, **{name: value for name, value in named.items() if name != "gpu"})
        except TypeError:  # wrong arguments: the look-up itself raises
            return choose(chooser, *arguments, **named)
        act(chooser, case)
        return choose(chooser, *arguments, **named)

    return replaced({(Chooser, "__call__"): look_up})


def _without_free_options(op: Op, case: Case) -> Case:
    """Return a case without its name and free options: calls with another value of a free option share configs."""
    return replace(case, name="", options=tuple(option for option in case.options if option[0] not in op.free_options))
