"""Whether cached configs are still what they were stored for: fresh, stale but good, stale and slower, or invalid.

Changes no cache and prints nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kerneltune.cache import Entry
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.tuning.cached import present, stamp

Duel = Callable[[Op, Case, Variant, Sequence[Config]], tuple[int, dict[str, Any]]]
"""Which of configs is the fastest, the first unless another surely is, and the evidence for it; the last is the default."""

_OF_THE_SEARCH = ("trials", "imported", "before")
"""What evidence says of how a config was found, whenever it is timed again."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of an entry.

    Attributes:
        status: `fresh`; `stale` where no GPU can tell more; `stale-but-good`, `stale-slower`; `invalid`.
        reason: one line.
        renewed: of a `stale-but-good` entry: the same with the evidence of the duel that it has just stood.
    """

    entry: Entry
    status: str
    reason: str = ""
    renewed: Entry | None = None


def verify(op: Op, entry: Entry, duel: Duel | None) -> Verdict:
    """Judge an entry of an operator; `duel` measures, None where this machine has not the entry's GPU."""
    case = Case(entry.case, entry.axes, entry.dtype, entry.quant, entry.options)
    try:
        variant = op.variant(entry.variant)
        config = variant.config_from(entry.config)
        reason = variant.unsupported(case) or variant.valid(case, config)
        default = variant.default_config(case)
    except Exception as error:  # what an operator's own code says of an old entry
        return Verdict(entry, "invalid", " ".join(str(error).split()) or type(error).__name__)
    if reason is not None:
        return Verdict(entry, "invalid", reason)
    stale = changed(variant, entry, duel is not None)
    if not stale:
        return Verdict(entry, "fresh")
    if duel is None:
        return Verdict(entry, "stale", stale)
    try:
        best, measured = duel(op, case, variant, list(dict.fromkeys([config, default])))
    except ValueError as error:
        return Verdict(entry, "invalid", str(error))
    if best:
        return Verdict(entry, "stale-slower", f"{stale}: the default is faster")
    found = {name: entry.evidence[name] for name in _OF_THE_SEARCH if name in entry.evidence}
    return Verdict(entry, "stale-but-good", stale, replace(entry, evidence={**measured, **found, **stamp(variant)}))


def changed(variant: Variant, entry: Entry, here: bool) -> str:
    """Return what has changed since an entry was stored; empty if nothing has.

    Args:
        here: this machine has the entry's GPU. On others only the code is compared, not the driver and the packages.
    """
    now = present(variant) if here else {"source_hash": variant.source_hash}
    then = {name: entry.evidence.get(name) for name in now}
    return ", ".join(f"{name} {then[name] or 'unknown'} is now {now[name]}" for name in now if then[name] != now[name])
