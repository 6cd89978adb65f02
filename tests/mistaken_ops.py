"""Check operators with planted mistakes without a GPU; they are declared as docs/your_own_kernel.md says."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kerneltune.checking import pairs
from kerneltune.checking.addresses import address_errors
from kerneltune.checking.check import Checker
from kerneltune.checking.derived import derived_cases
from kerneltune.checking.reruns import wrong_in_reverse
from kerneltune.kernel_lib.agreement import close
from kerneltune.kernel_lib.check_values import vary_rows
from kerneltune.spec import Case, Inputs, Op, Outputs, Traffic, Variant


def case_of(name: str, M: int, N: int) -> Case:
    return Case(name, (("M", M), ("N", N)), "float32")


CASES = [case_of("one", 1, 2), case_of("odd", 13, 34), case_of("wide", 8, 260)]
SMALL = [case_of("one", 1, 1), case_of("odd", 7, 70), case_of("wide", 3, 140)]
LARGE = case_of("large", 1_000_000, 4_000)


@dataclass(frozen=True, slots=True)
class Knobs:
    """parts: rows of a program, or parts of a sum; block: columns of a tile."""

    parts: int
    block: int


def values(seed: int, device: str, *shape: int) -> torch.Tensor:
    if device == "meta":
        return torch.empty(shape, device=device)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_of(case: Case, *, device: str, seed: int = 0) -> Inputs:
    x = values(seed, device, case["M"], case["N"])
    return {"x": x if device == "meta" else vary_rows(x)}


def all_close(_case: Case, _inputs: Inputs, outputs: Outputs, expected: Outputs) -> list[str]:
    return [line for name in expected for line in close(name, outputs[name], expected[name], 1e-3, 1e-4)]


@dataclass(frozen=True)
class Mistaken:
    """Hold an operator whose launch takes the name of a mistake, empty for none.

    Attributes:
        cases: check cases; a case with more rows than columns is derived. Without them, `CASES`.
    """

    launch: Callable[[str, Inputs, Knobs], Outputs]
    inputs: Callable[..., Inputs]
    reference: Callable[[Inputs], Outputs]
    mistakes: tuple[str, ...]
    compare: Callable[..., list[str]] = all_close
    cases: Sequence[Case] = ()

    def findings(self, mistake: str) -> list[str]:
        """Check default configs, covering pairs and the addresses of a large case, until a check finds something."""
        space: Any = {"parts": (1, 2, 4), "block": (16, 64, 512)}
        run = partial(self.launch, mistake)
        variant = Variant("optimized", run, Knobs, lambda _case: space, default=lambda _case: Knobs(1, 512))
        op = Op(
            name="mistaken", axes=("M", "N"), dtypes=("float32",), inputs=self.inputs, reference=self.reference,
            compare=self.compare, traffic=lambda case: Traffic(4 * case["M"] * case["N"], 4 * case["M"] * case["N"]),
            variants=(variant,), module=__name__,
        )  # fmt: skip
        default = variant.default_config(LARGE)
        cases = [*self.cases, *derived_cases(op, self.cases, [LARGE])[0]] if self.cases else CASES
        for case in cases:
            if errors := Checker(op, case, "cpu").run(variant, default)[1]:
                return errors
        outcomes = pairs.check_pairs(op, variant, cases)
        errors = [outcome.reason for outcome in outcomes if outcome.status == "failed"]
        errors = errors or address_errors(op, LARGE, variant, default)
        return errors or [outcome.reason for outcome in wrong_in_reverse(op, variant, cases)]


def mistakes_of(operators: dict[str, Mistaken]) -> list[tuple[str, str]]:
    """Return the name of each operator with each of its mistakes."""
    return [(name, mistake) for name, operator in operators.items() for mistake in operator.mistakes]
