"""Whether cached configs are still what they were stored for: fresh, stale but good, stale and slower, or invalid.

Changes no cache and prints nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kerneltune import device
from kerneltune.cache import Entry
from kerneltune.spec import Case, Config, Op, Variant

Duel = Callable[[Op, Case, Variant, Sequence[Config]], int]
"""Which of configs is the fastest, the first unless another surely is."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """status: `fresh`; `stale` where no GPU can tell more; `stale-but-good`, `stale-slower`; `invalid`. reason: one line."""

    entry: Entry
    status: str
    reason: str = ""


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
    changed = _changed(op, entry, duel is not None)
    if not changed:
        return Verdict(entry, "fresh")
    if duel is None:
        return Verdict(entry, "stale", changed)
    try:
        best = duel(op, case, variant, list(dict.fromkeys([config, default])))
    except ValueError as error:
        return Verdict(entry, "invalid", str(error))
    return Verdict(entry, "stale-slower" if best else "stale-but-good", changed + (": the default is faster" if best else ""))


def _changed(op: Op, entry: Entry, on_gpu: bool) -> str:
    """What the evidence says that is no longer so; the driver is known on a GPU only."""
    now = {"source_hash": op.source_hash, **device.versions()} | ({"driver": device.current().driver} if on_gpu else {})
    then = {name: entry.evidence.get(name) for name in now}
    return ", ".join(f"{name} {then[name] or 'unknown'} is now {now[name]}" for name in now if then[name] != now[name])
