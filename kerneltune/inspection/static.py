"""Save, load and judge the facts about configs that compiling alone gives, without a launch.

This module compiles nothing and needs no GPU.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kerneltune.errors import unknown
from kerneltune.files import decode_versioned, read_bytes, replace_text
from kerneltune.measuring.assembly import LIMITS, Kernel, occupancy_of, typical_bits

SCHEMA = 1
PASS, REGRESSION, UNUSABLE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class StaticRow:
    """Hold the kernels of a variant's config for a case, compiled for a target; `error` is the reason if there are no kernels."""

    op: str
    variant: str
    case: str
    policy: str
    target: str
    config: dict[str, Any]
    kernels: tuple[Kernel, ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for a target whose limits are unknown."""
        if self.target not in LIMITS:
            raise unknown("target", self.target, LIMITS)

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """Return operator, variant, case, policy and target; a set has at most one row per key."""
        return self.op, self.variant, self.case, self.policy, self.target

    @property
    def label(self) -> str:
        """Return the key in one line."""
        return f"{self.op} {self.variant} {self.case}{'' if self.policy == 'cold' else ' ' + self.policy} {self.target}"


@dataclass(frozen=True, slots=True)
class Survey:
    """Hold rows and the version of triton that compiled them: another version allocates other registers."""

    triton: str
    rows: tuple[StaticRow, ...]


@dataclass(frozen=True, slots=True)
class StaticVerdict:
    """Hold the static gate's answer: one line per finding; exit code 0 pass, 1 regression, 2 nothing compared."""

    findings: tuple[str, ...]
    summary: str
    exit_code: int = PASS


def save(path: Path, survey: Survey) -> None:
    """Write a survey to a file, a line per row."""
    head = f'{{\n  "schema": {SCHEMA},\n  "triton": {json.dumps(survey.triton)},\n  "rows": [\n'
    rows = ",\n".join("    " + json.dumps(asdict(row), ensure_ascii=False) for row in sorted(survey.rows, key=lambda r: r.key))
    replace_text(path, f"{head}{rows}\n  ]\n}}\n")


def load(path: Path) -> Survey:
    """Read a survey from a file that `save` wrote."""
    data = read_bytes(path)
    try:
        return decode_versioned(data, Survey, SCHEMA)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def static_gate(baseline: Survey, new: Survey, unchanged: int = 0) -> StaticVerdict:
    """Find new spills, narrower accesses, and configs that no longer compile or fit, in rows that both sets have.

    An access is narrower if the width that carries most bits of a kernel's loads, or of its stores, is less than before.
    A row that only the new set has is judged for errors only. A row that compiles in neither set is not compared.

    Args:
        unchanged: number of rows in neither set, because code and config are unchanged.
    """
    if baseline.triton != new.triton:
        return StaticVerdict((), f"not comparable: baseline made with triton {baseline.triton}, here {new.triton}", UNUSABLE)
    before = {row.key: row for row in baseline.rows}
    findings: list[str] = []
    counts: Counter[str] = Counter()
    for row in new.rows:
        old = before.pop(row.key, None)
        if row.error:
            counts["broken in both" if old is not None and old.error else "compared"] += 1
            if old is None or not old.error:
                findings.append(f"{row.label}: {row.error}")
        elif old is None:
            counts["new"] += 1
        else:
            counts["compared"] += 1
            findings += [f"{row.label}: {line}" for line in _worse(old.kernels, row.kernels)]
    counts["gone"] = len(before)
    counts["unchanged"] = unchanged
    names = ("compared", "new", "gone", "broken in both", *(["unchanged"] if counts["unchanged"] else []))
    text = ", ".join(f"{counts[name]} {name}" for name in names)
    if not counts["compared"] and not counts["unchanged"]:
        return StaticVerdict((), f"nothing compared: {text}", UNUSABLE)
    if findings:
        return StaticVerdict(tuple(findings), f"static regression: {len(findings)} found; {text}", REGRESSION)
    return StaticVerdict((), f"pass: no new spills, no narrower accesses, nothing over a limit; {text}")


def changed_facts(old: StaticRow, new: StaticRow) -> list[tuple[str, str, str, str]]:
    """Return (kernel, property, old value, new value) for each property that differs between two rows of a target."""
    found = [("", "error", old.error or "-", new.error or "-")] if old.error != new.error else []
    for first, second in _pairs(old.kernels, new.kernels):
        name = first.name if first else second.name if second else ""
        before, after = (facts(kernel, row.target) if kernel else {} for kernel, row in ((first, old), (second, new)))
        changed = ((what, before.get(what, "-"), after.get(what, "-")) for what in before | after)
        found += [(name, what, a, b) for what, a, b in changed if a != b]
    return found


def numbered(kernels: Sequence[Kernel]) -> dict[tuple[str, int], Kernel]:
    """Return the kernels, keyed by name and by the number of earlier kernels with the same name."""
    seen: Counter[str] = Counter()
    found = {}
    for kernel in kernels:
        found[kernel.name, seen[kernel.name]] = kernel
        seen[kernel.name] += 1
    return found


def facts(kernel: Kernel, target: str) -> dict[str, str]:
    """Return property -> value of a kernel on a target, in print; accesses are widths in bits and counts: `128x4 32x1`."""
    held = occupancy_of(kernel, target)
    widths = {a.kind: " ".join(f"{b.bits}x{b.count}" for b in kernel.accesses if b.kind == a.kind) for a in kernel.accesses}
    return {
        "warps": f"{kernel.warps}",
        "registers": f"{kernel.registers}",
        "spill B": f"{kernel.spill_bytes}",
        "shared B": f"{kernel.shared_bytes}",
        "programs": f"{held.programs}",
        "resident warps": f"{held.warps}/{held.of_warps}",
        "limiter": held.limiter,
        "loads": widths.get("load", "-"),
        "stores": widths.get("store", "-"),
    }


def _worse(old: Sequence[Kernel], new: Sequence[Kernel]) -> list[str]:
    found = []
    for first, second in _pairs(old, new):
        if second is None:
            continue
        spilled = first.spill_bytes if first else max((kernel.spill_bytes for kernel in old), default=0)
        if second.spill_bytes > spilled:
            found.append(f"{second.name}: spills {second.spill_bytes} bytes per thread, was {spilled}")
        for kind in ("load", "store") if first else ():
            was, now = (typical_bits(kernel.accesses, kind) for kernel in (first or second, second))
            if 0 < now < was:
                found.append(f"{second.name}: {kind}s are {now} bits wide, were {was}")
    return found


def _pairs(old: Sequence[Kernel], new: Sequence[Kernel]) -> list[tuple[Kernel | None, Kernel | None]]:
    """Pair each kernel with the other side's kernel of the same name, in the order of the launches."""
    left, right = numbered(old), numbered(new)
    return [(left.get(key), right.get(key)) for key in dict.fromkeys([*left, *right])]
