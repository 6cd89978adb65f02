"""Judge what an operator declares of a case: the bytes of `traffic`, and inputs that are seeds."""

import itertools
from copy import copy

import torch
from torch.utils._pytree import tree_leaves

from kerneltune.interpreter.races import touching
from kerneltune.measuring.check import Checker, is_whole, same_bits
from kerneltune.spec import Config, Variant

_NEAR_TRAFFIC = 1.25
"""Largest factor between the declared bytes of `traffic` and the bytes of accesses: small tensors may be left out."""


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


def seeds_without_effect(checker: Checker, variant: Variant, config: Config) -> list[str]:
    """Return a text for each input named a seed whose next value gives the same outputs, as if it were ignored."""
    texts = list[str]()
    for name, value in checker.inputs.items():
        if "seed" in name.lower() and (type(value) is int or (isinstance(value, torch.Tensor) and is_whole(value.dtype))):
            other = copy(checker)
            other.inputs = {**checker.inputs, name: value + 1}
            other.inputs_before = {kept: before for kept, before in checker.inputs_before.items() if kept != name}
            changed, outputs = other.run(variant, config)[0], checker.outputs(variant, config)
            if changed and all(same_bits(it, changed[key]) for key, it in outputs.items() if isinstance(it, torch.Tensor)):
                texts.append(f"{name} + 1 gives the same outputs in case {checker.case.name}: is it ignored?")
    return texts
