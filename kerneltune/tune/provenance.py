"""Describe the driver, packages and source of a variant's times, and the changes since a time was stored."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kerneltune import device
from kerneltune.cache import CacheEntry
from kerneltune.processes import commit
from kerneltune.search.task import store_path
from kerneltune.spec import Op, Variant

if TYPE_CHECKING:
    from kerneltune.search.trials import TrialStore


def present(variant: Variant) -> dict[str, str]:
    """Return the present driver, source and packages that times of a variant depend on, by the names of `CacheEntry.evidence`."""
    return {"driver": device.current().driver, "source_hash": variant.source_hash, **device.versions()}


def open_store(op: Op, variant: Variant, results: Path, retries_transient: bool = False) -> "TrialStore":
    """Open the store of an operator's trials on this GPU model, with the present fingerprint of a variant.

    results: folder of the records; retries_transient: as in `TrialStore`.
    """
    from kerneltune.search.trials import TrialStore  # imports Optuna, which takes 0.4 s

    path = store_path(results, device.current().slug, op.name)
    return TrialStore(path, commit(), retries_transient, **present(variant))


def stamp(variant: Variant) -> dict[str, Any]:
    """Return the date, commit, driver, source and packages of a measurement now."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), **present(variant)}


def changed(variant: Variant, entry: CacheEntry, here: bool) -> str:
    """Return the changes since an entry was stored; empty if nothing changed.

    Args:
        here: this machine has the entry's GPU. On another machine only the code is compared, not the driver and the packages.
    """
    now = present(variant) if here else {"source_hash": variant.source_hash}
    then = {name: entry.evidence.get(name) for name in now}
    return ", ".join(f"{name} {then[name] or 'unknown'} is now {now[name]}" for name in now if then[name] != now[name])
