"""Find outputs that a variant gives in another way than before: over an input or in memory of their own, or of another type."""

from collections.abc import Mapping
from typing import Any

import torch

from kerneltune.spec import Case, Outputs, Variant


class FirstSeen:
    """Remember how variants gave each output first, and in which case. Checkers of several cases share it."""

    def __init__(self) -> None:
        self._first: dict[tuple[object, ...], tuple[Any, Case]] = {}

    def _other(self, case: Case, answer: object, *question: object) -> tuple[Any, Case] | None:
        """Return the first answer to a question with its case, if the answer in this case is another; else None."""
        first = self._first.setdefault(question, (answer, case))
        return first if first[0] != answer else None

    def other_place(self, variant: Variant, case: Case, are_over_inputs: Mapping[str, bool]) -> list[str]:
        """Return a line for an output that a variant writes over an input in this case, and not in an earlier case, or inversely.

        So a copy by `contiguous()` or `to(dtype)` is found, which copies only some tensors. Modes may place outputs differently.
        """
        for name, is_over_input in are_over_inputs.items():
            if other := self._other(case, is_over_input, variant.run, case.quant, name):
                cases = (case, other[1]) if is_over_input else (other[1], case)
                in_place, elsewhere = (f"{each.name} {each.dtype} {each.quant}" for each in cases)
                other_run = "in another run" if in_place == elsewhere else f"in case {elsewhere}"
                return [f"outputs: {name} is written over an input in case {in_place}, and not {other_run}"]
        return []

    def other_type(self, variant: Variant, case: Case, outputs: Outputs, expected: Outputs) -> list[str]:
        """Return a line for an output whose element type is wider than the reference's, or depends on the config or the sizes.

        A reference may compute in fp32 for a variant that returns 16 bits, and may give other integers in every case.
        """
        of_output = variant.run, case.dtype, case.quant
        for name, tensor in outputs.items():
            if not isinstance(tensor, torch.Tensor) or not isinstance(expected.get(name), torch.Tensor):
                continue
            dtype, in_reference = tensor.dtype, expected[name].dtype
            if other := self._other(case, dtype, *of_output, name, "type", case.options):
                return [f"{name}: {dtype}, and {other[0]} with another config or in case {other[1].name}"]
            are_floats = dtype.is_floating_point and in_reference.is_floating_point
            if are_floats and dtype != in_reference and dtype.itemsize >= in_reference.itemsize:
                return [f"{name}: {dtype}, expected {in_reference} as of the reference"]
            if not (holds_integers(dtype) and holds_integers(in_reference)):
                continue
            if other := self._other(case, dtype == in_reference, *of_output, name, "reference's type"):
                return [f"{name}: {dtype}, {in_reference} in the reference; equal types in case {other[1].name}, or inversely"]
        return []


def holds_integers(dtype: torch.dtype) -> bool:
    """Return whether elements are integers; `torch.bool` has none."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
