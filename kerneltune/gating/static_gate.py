"""Judge configs by the facts that compiling alone gives, against the configs of a file or a revision."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kerneltune.gating.verdict import PASS, REGRESSION, UNUSABLE, Verdict
from kerneltune.inspection.static import Survey, numbered
from kerneltune.measuring.assembly import Kernel, narrowed_bits, typical_bits
from kerneltune.wording import differing


def static_gate(baseline: Survey, new: Survey, unchanged: int = 0, refused: Callable[[list[str]], list[str]] = list) -> Verdict:
    """Find new spills, narrower accesses, and configs that no longer compile or fit, in rows that both sets have.

    An access is narrower if the width that carries most bits of a kernel's loads, or of its stores, is less than before, or if
    narrower accesses carry bits that this width carried.
    A row that only the new set has is judged for errors only. A row that compiles in neither set is not compared. Rows whose two
    sides have other knobs are compared, counted and named: a new config may be the reason of a spill.

    Args:
        unchanged: number of rows in neither set, because code and config are unchanged.
        refused: function that returns the findings that are not accepted.
    """
    if baseline.triton != new.triton:
        return Verdict((), UNUSABLE, f"not comparable: baseline made with triton {baseline.triton}, here {new.triton}")
    before = {row.key: row for row in baseline.rows}
    findings: list[str] = []
    counts, num_of_another = Counter[str](), 0
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
            knobs = differing(row.config, old.config)
            num_of_another += knobs is not None
            config = f" ({knobs[0]}, was {knobs[1]})" if knobs else ""
            findings += [f"{row.label}: {line}{config}" for line in _worse(old.kernels, row.kernels)]
    counts["gone"] = len(before)
    counts["unchanged"] = unchanged
    names = ["compared", "new", "gone", "broken in both", *(["unchanged"] if unchanged else [])]
    text = ", ".join(f"{counts[name]} {name}" for name in names)
    if num_of_another:
        text = text.replace("compared", f"compared, {num_of_another} of them with another config")
    if not counts["compared"] and not counts["unchanged"]:
        return Verdict((), UNUSABLE, f"nothing compared: {text}")
    left = refused(findings)
    notes = tuple(f"accepted: {finding}" for finding in findings if finding not in left)
    if left:
        return Verdict((), REGRESSION, f"{len(left)} found in compiled code; {text}", notes, slower=tuple(left))
    none = f"{len(notes)} found and accepted" if notes else "no new spills, no narrower accesses, nothing over a limit"
    return Verdict((), PASS, f"{none}; {text}", notes)


def _worse(old: Sequence[Kernel], new: Sequence[Kernel]) -> Iterator[str]:
    """Yield a line for each kernel that spills more or accesses memory less widely than its earlier self, by name and order."""
    before = numbered(old)
    for key, second in numbered(new).items():
        first = before.get(key)
        spilled = first.spill_bytes if first else max((kernel.spill_bytes for kernel in old), default=0)
        if second.spill_bytes > spilled:
            yield f"{second.name}: spills {second.spill_bytes} bytes per thread, was {spilled}"
        for kind in ("load", "store"):
            was, now = (typical_bits(kernel.accesses, kind) for kernel in (first or second, second))
            if 0 < now < was:
                yield f"{second.name}: {kind}s are {now} bits wide, were {was}"
            elif narrowed := narrowed_bits((first or second).accesses, second.accesses, kind):
                yield f"{second.name}: {narrowed} bits of {kind}s are less than {was} bits wide"
