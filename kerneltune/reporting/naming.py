"""What tables, charts and the page call a case: one value, which all of them print.

Pure; does not lay anything out. Imports the standard library, cells, spec and records.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kerneltune.cells import pairs
from kerneltune.records import Record
from kerneltune.spec import Option


@dataclass(frozen=True, slots=True)
class CaseName:
    """A case among others.

    Attributes:
        case: what people call it; no part of its identity.
        options: options, policy and device by name; `told_apart` leaves those that are not the same in all cases.
        kind: last part of the operator's name, `fwd`; all of it where another operator's ends likewise.
    """

    op: str
    case: str
    dtype: str
    quant: str
    axes: Mapping[str, int]
    options: Mapping[str, Option]
    kind: str = ""

    @property
    def settings(self) -> str:
        """The options in one line: `layout=both groups=zipf`; empty where there are none."""
        return pairs(self.options)

    @property
    def shape(self) -> str:
        """`8192×4096`."""
        return "×".join(map(str, self.axes.values()))

    @property
    def heading(self) -> str:
        """What is above the shapes of one kind: `fwd bfloat16 fp8 row_pad=8 M×N`."""
        return " ".join(filter(None, [self.kind, self.dtype, self.quant, self.settings, "×".join(self.axes)]))

    @property
    def title(self) -> str:
        """What is above a chart of such shapes: `rmsnorm_fwd · fp8 · bfloat16 · row_pad=8`."""
        return " · ".join(filter(None, [self.op, self.quant, self.dtype, self.settings]))


def case_names(records: Iterable[Record]) -> list[CaseName]:
    """The names of the records' cases, told apart."""
    return told_apart(
        CaseName(r.op, r.case, r.dtype, r.quant, r.axes, {**r.options, "policy": r.policy, "device": r.device}) for r in records
    )


def told_apart(cases: Iterable[CaseName]) -> list[CaseName]:
    """The cases with their kinds, and without the options that are the same in all cases that have them."""
    cases = list(cases)
    values: dict[str, set[str]] = {}
    for case in cases:
        for name, value in case.options.items():
            values.setdefault(name, set()).add(str(value))
    short = {case.op: case.op.rsplit("_", 1)[-1] for case in cases}
    ends = Counter(short.values())
    kinds = {op: kind if ends[kind] == 1 else op for op, kind in short.items()}
    varied = [{name: value for name, value in case.options.items() if len(values[name]) > 1} for case in cases]
    return [replace(case, options=options, kind=kinds[case.op]) for case, options in zip(cases, varied, strict=True)]
