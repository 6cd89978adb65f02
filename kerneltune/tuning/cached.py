"""Configs of the cache that a variant still supports, and what an entry's evidence says of the present. Measures nothing.

Entries outlive the knobs and the limits that they were stored for.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kerneltune import cache, device
from kerneltune.measuring.compare import commit
from kerneltune.search.task import Task
from kerneltune.spec import Config, Variant


def fitting(task: Task, root: Path | None, *, device_slug: str = "", nearest: bool = True) -> Iterator[tuple[cache.Hit, Config]]:
    """Return the cached configs that are valid for a task, in the cache's order.

    Args:
        task: whose configs are wanted.
        root: the configs folder, None for the usual one.
        device_slug: whose configs, this GPU's if not given.
        nearest: also configs of other sizes and options than the case's own.
    """
    op, case, variant = task.op, task.case, task.variant
    free_axes, free_options = (op.free_axes, op.free_options) if nearest else ((), ())
    where = (case.axes, case.dtype, case.quant, case.options, task.policy, free_axes, root, free_options, op.bands)
    for hit in cache.candidates(op.name, variant.name, device_slug or device.current().slug, *where):
        try:
            config = variant.config_from(hit.entry.config)
            fits = variant.valid(case, config) is None
        except (ValueError, ArithmeticError):  # of knobs that no space has, such as tiles of 0 rows
            continue
        if fits:
            yield hit, config


def cached(task: Task, root: Path | None, device_slug: str = "") -> tuple[cache.CacheEntry, Config] | None:
    """Return the entry that was stored for exactly this task, and its config, if that still fits."""
    hits = fitting(task, root, device_slug=device_slug, nearest=False)
    return next(((hit.entry, config) for hit, config in hits if hit.exact), None)


def config_for(task: Task, root: Path | None) -> Config:
    """Return what a call without `config=` runs a task with, by the same look-up; None for a variant without knobs."""
    return looked_up(task, root).config if task.variant.config is not None else None


def looked_up(task: Task, root: Path | None) -> cache.Choice:
    """Return what the look-up of a call without `config=` finds for a variant with knobs, and from where."""
    return cache.Chooser.of(task.op, task.variant, task.policy, root).find(task.op.called(task.case))


def present(variant: Variant) -> dict[str, str]:
    """Return what times of a variant depend on besides case and config, as it is now, by the names of `Entry.evidence`."""
    return {"driver": device.current().driver, "source_hash": variant.source_hash, **device.versions()}


def stamp(variant: Variant) -> dict[str, Any]:
    """Return the evidence of when, at which commit and with what a variant is measured now."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), **present(variant)}


def changed(variant: Variant, entry: cache.CacheEntry, here: bool) -> str:
    """Return what has changed since an entry was stored; empty if nothing has.

    Args:
        here: this machine has the entry's GPU. On others only the code is compared, not the driver and the packages.
    """
    now = present(variant) if here else {"source_hash": variant.source_hash}
    then = {name: entry.evidence.get(name) for name in now}
    return ", ".join(f"{name} {then[name] or 'unknown'} is now {now[name]}" for name in now if then[name] != now[name])
