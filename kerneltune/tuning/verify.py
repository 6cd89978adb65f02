"""Whether cached configs are still what they were stored for: fresh, stale but good, stale and slower, or invalid.

Changes no cache and prints nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kerneltune import cache, device
from kerneltune.cache import CacheEntry
from kerneltune.errors import unknown
from kerneltune.plan import Options, Progress
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.tuning.cached import changed, stamp
from kerneltune.tuning.isolated import ChildCrashedError
from kerneltune.tuning.machines import Machines

RunFinal = Callable[[Op, Case, Variant, Sequence[Config]], tuple[int, dict[str, Any]]]
"""Which of configs is the fastest, the first unless another surely is, and the evidence for it; the last is the default."""

_OF_THE_SEARCH = ("trials", "imported", "before")
"""What evidence says of how a config was found, whenever it is timed again."""


@dataclass(frozen=True, slots=True)
class EntryVerdict:
    """Of an entry.

    Attributes:
        status: `fresh`; `stale` where no GPU can tell more; `stale-but-good`, `stale-slower`; `invalid`.
        reason: one line.
        renewed: of a `stale-but-good` entry: the same with the evidence of the paired final that it has just won.
    """

    entry: CacheEntry
    status: str
    reason: str = ""
    renewed: CacheEntry | None = None


def verify(op: Op, entry: CacheEntry, final: RunFinal | None) -> EntryVerdict:
    """Judge an entry of an operator; `final` times it against the default, None where this machine has not the entry's GPU."""
    case = Case(entry.case, entry.axes, entry.dtype, entry.quant, entry.options)
    try:
        variant = op.variant(entry.variant)
        config = variant.config_from(entry.config)
        reason = variant.unsupported(case) or variant.valid(case, config)
        default = variant.default_config(case)
    except Exception as error:  # what an operator's own code says of an old entry
        return EntryVerdict(entry, "invalid", " ".join(str(error).split()) or type(error).__name__)
    if reason is not None:
        return EntryVerdict(entry, "invalid", reason)
    stale = changed(variant, entry, final is not None)
    if not stale:
        return EntryVerdict(entry, "fresh")
    if final is None:
        return EntryVerdict(entry, "stale", stale)
    try:
        best, measured = final(op, case, variant, list(dict.fromkeys([config, default])))
    except ValueError as error:
        return EntryVerdict(entry, "invalid", str(error))
    if best:
        return EntryVerdict(entry, "stale-slower", f"{stale}: the default is faster")
    found = {name: entry.evidence[name] for name in _OF_THE_SEARCH if name in entry.evidence}
    return EntryVerdict(entry, "stale-but-good", stale, replace(entry, evidence={**measured, **found, **stamp(variant)}))


def verify_cache(
    ops: Mapping[str, Op],
    entries: Sequence[tuple[str, str, CacheEntry]],
    options: Options,
    progress: Progress,
    renew: bool = False,
) -> list[tuple[str, str, EntryVerdict]]:
    """Judge cached entries, given as (device, operator, entry); those of this machine's GPU that are stale are timed again.

    renew: store what is stale but good with the evidence of that.

    Raises:
        ValueError: an operator that does not exist, or a folder that cannot be written.
    """
    here = device.current()
    for _, name, _ in entries:
        if name not in ops:
            raise unknown("op", name, ops)
    found = []
    progress.stage("verify", len(entries))
    with ExitStack() as stack:
        machines = stack.enter_context(Machines(options)) if any(slug == here.slug for slug, *_ in entries) else None
        for slug, name, entry in entries:
            final = partial(_run_final, machines, entry.policy) if machines is not None and slug == here.slug else None
            verdict = verify(ops[name], entry, final)
            if renew and verdict.renewed is not None:
                cache.store(name, slug, verdict.renewed, options.configs)
            found.append((slug, name, verdict))
            progress.advance(f"{name} {entry.variant} {entry.case} {entry.dtype} {entry.quant}")
    return found


def _run_final(
    machines: Machines, policy: str, op: Op, case: Case, variant: Variant, configs: Sequence[Config]
) -> tuple[int, dict[str, Any]]:
    """Return which config wins, the first unless another is surely faster, and the evidence; the last is the default.

    Raises:
        ValueError: the first is wrong now, or cannot be timed.
    """
    try:
        with machines.tuner(op, case, variant, policy) as tuner:
            trials = tuner.trials(configs)
            if trials[0].time_us is None:
                raise ValueError(f"{trials[0].status}: {trials[0].detail}")
            timed = [config for config, trial in zip(configs, trials, strict=True) if trial.time_us is not None]
            best, evidence = tuner.run_final(timed, configs[-1])
    except ChildCrashedError as error:
        raise ValueError(f"lost: {error}") from error
    return configs.index(best), evidence
