"""Where two policies rank two variants of a case differently.

Pure. Imports the standard library, naming, records and spec.
"""

from collections.abc import Iterable, Mapping
from itertools import combinations, permutations

from kerneltune.records import Record, newest, other_run

_Timed = Mapping[str, Record]
"""Variant -> its record under one policy."""


def rank_flips(records: Iterable[Record]) -> str:
    """One line where a variant that is faster than another under one policy is slower under another, else empty.

    Faster by more than both intervals, in one run; parts of an operator are ranked with nothing.
    """
    cases: dict[object, dict[str, dict[str, Record]]] = {}
    for record in newest(records):
        if record.status == "passed" and record.role != "part":
            policies = cases.setdefault((record.device, record.key[:-1]), {})
            policies.setdefault(record.policy, {})[record.variant] = record
    several = [list(policies.values()) for policies in cases.values() if len(policies) > 1]
    flipped = [flip for policies in several if (flip := _flip(policies))]
    if not flipped:
        return ""
    first, second = flipped[0]
    such_as = (
        f"{first.variant} is faster than {second.variant} {first.policy}, slower {second.policy}: {first.case} {first.dtype}"
    )
    return f"ranks flip in {len(flipped)} of {len(several)} cases with several policies; {such_as} {first.quant}"


def _flip(policies: Iterable[_Timed]) -> tuple[Record, Record] | None:
    """Return the records of two variants, each where it is the faster one; None where no policy reverses another's order."""
    for here, there in combinations(policies, 2):
        for x, y in permutations([name for name in here if name in there], 2):
            if _faster(here[x], here[y]) and _faster(there[y], there[x]):
                return here[x], there[y]
    return None


def _faster(x: Record, y: Record) -> bool:
    """Surely, and in one run."""
    assert x.ci_high_us is not None and y.ci_low_us is not None
    return x.ci_high_us < y.ci_low_us and not other_run(x, y)
