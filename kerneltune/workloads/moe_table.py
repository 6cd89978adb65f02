"""Tabulate the parts of a training step's time, and the share of its bound that it reaches.

Pure: imports no torch.
"""

from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from kerneltune.records import Record, other_run
from kerneltune.table import Column, Row, Table, ratio

RECIPES = ("tensorwise", "rowwise", "delayed")
MICROBATCHES = 8
"""Steps that share one cast of the weights in the column `cached`."""
OPS = ("moe_step",)
_COLUMNS = (
    Column("case"),
    Column("groups", shared=True),
    Column("recipe"),
    Column("bf16 µs", digits=0, key="bf16_us"),
    Column("torchao µs", digits=0, key="torchao_us", rank=2),
    Column("step µs", digits=0, key="step_us"),
    Column("x bf16", digits=2, suffix="x", key="times_bf16"),
    Column("x torchao", digits=2, suffix="x", key="times_torchao", rank=1),
    Column("% bound", digits=1, key="pct_bound", rank=1),
    Column("cached µs", digits=0, key="cached_us", rank=3),
    Column("cached x bf16", digits=2, suffix="x", key="cached_times_bf16", rank=3),
    Column("bound µs", digits=0, key="bound_us", rank=4),
    Column("casts µs", digits=0, key="casts_us", rank=4),
    Column("products µs", digits=0, key="products_us", rank=4),
    Column("other µs", digits=0, key="other_us", rank=4),
    Column("compiled µs", digits=0, key="compiled_us", rank=5),
    Column("torchao commit", key="torchao_commit", rank=6),
)


_Row = dict[str, Any]
"""The values of a row by the keys of the columns; None where a part has no time."""


def tables(records: Sequence[Record]) -> list[Table]:
    """Return a table per policy and device: a row per case and recipe, what its columns mean, and the geometric means.

    Rows are in the order of the records of `moe_step`; the last record of a kind counts.
    """
    cases: dict[tuple[str, str], dict[object, dict[str, Record]]] = {}
    for record in records:
        if record.op in OPS:
            of_place = cases.setdefault((record.policy, record.device), {})
            of_place.setdefault(record.key, {})[record.variant] = record
    rows = {
        place: [_row(found, recipe) for found in of_place.values() for recipe in RECIPES if recipe in found]
        for place, of_place in cases.items()
    }
    return [_table(found, ", ".join(place) if len(rows) > 1 else "") for place, found in rows.items() if found]


def _row(found: dict[str, Record], recipe: str) -> _Row:
    def time(variant: str) -> float | None:
        return found[variant].time_us if variant in found else None

    def beside(variant: str) -> float | None:
        """Return the time of a variant of the step's run."""
        return None if variant not in found or other_run(record, found[variant]) else found[variant].time_us

    record = found[recipe]
    step, cached, refresh, casts = record.time_us, *(beside(f"{recipe}_{part}") for part in ("cached", "refresh", "casts"))
    products = beside("rowwise_gemms" if recipe == "rowwise" else "tensorwise_gemms")  # of the same operands and scales
    whole = None if cached is None or refresh is None else cached + refresh / MICROBATCHES
    least = None if step is None or record.pct_ceiling is None else step * record.pct_ceiling / 100
    bound = None if products is None or least is None else products + least
    share = ratio(bound, step)
    return {
        "case": record.case,
        "groups": str(record.options.get("groups", "")),
        "recipe": recipe,
        "bf16_us": time("baseline"),
        "torchao_us": time("torchao_rowwise"),
        "step_us": step,
        "times_bf16": ratio(beside("baseline"), step),
        "times_torchao": ratio(beside("torchao_rowwise"), step),
        "pct_bound": None if share is None else 100 * share,
        "cached_us": whole,
        "cached_times_bf16": ratio(beside("baseline"), whole),
        "bound_us": bound,
        "casts_us": casts,
        "products_us": products,
        "other_us": None if step is None or casts is None or products is None else step - casts - products,
        "compiled_us": beside(f"{recipe}_compiled"),
        "torchao_commit": _elsewhere(found.get("torchao_rowwise"), found.get("baseline")),
    }


def _elsewhere(peer: Record | None, base: Record | None) -> str:
    return peer.commit if peer is not None and base is not None and peer.commit != base.commit else ""


def _table(rows: Sequence[_Row], title: str) -> Table:
    lines = [Row(tuple(row[column.csv_name] for column in _COLUMNS), "" if row["step_us"] else "not timed") for row in rows]
    means = tuple(filter(None, (_means(rows, recipe) for recipe in RECIPES)))
    return Table(_COLUMNS, tuple(lines), means, (_MEANING,), repeated=2, title=title)


_MEANING = (
    "bound: the products, and the fewest bytes of the casts at the speed of the ceiling. "
    f"cached: weights are cast once in {MICROBATCHES} steps. "
    "other: the step less casts and products, which are timed by themselves. compiled: the step under torch.compile. "
    "Ratios are of times of one run; blank: not measured in it."
)


def _means(rows: Sequence[_Row], recipe: str) -> str:
    """Return the geometric means of a recipe; empty if no two records can be compared."""
    mine = [row for row in rows if row["recipe"] == recipe]
    parts = []
    for peer in ("bf16", "torchao"):
        found = [r for row in mine if (r := row[f"times_{peer}"]) is not None]
        if found:
            parts.append(f"{geometric_mean(found):.2f}x {peer} ({len(found)} case{'' if len(found) == 1 else 's'})")
    return f"{recipe}: {', '.join(parts)}" if parts else ""
