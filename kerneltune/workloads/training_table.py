"""Tabulate training steps: the tokens per second of models, and the parts of the time of expert layers beside its bound."""

from collections.abc import Sequence
from statistics import geometric_mean

from kerneltune.records import Record, differing_run_fields, ratio
from kerneltune.table import CellValue, Column, Row, Table
from kerneltune.workloads import OfCase, cases_of

OPS = ("model_step", "moe_step")
RECIPES = ("tensorwise", "rowwise", "delayed")
MICROBATCHES = 8
"""Number of steps that share a cast of the weights in the column `cached`."""
_MODEL_COLUMNS = (
    Column("case"),
    Column("layers"),
    Column("variant"),
    Column("step ms", digits=1, key="step_ms"),
    Column("tokens/s", digits=0, key="tokens_per_s"),
    Column("x bf16", digits=2, suffix="x", key="times_bf16"),
    Column("x torchao", digits=2, suffix="x", key="times_torchao", rank=1),
)
_LAYER_COLUMNS = (
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
_MEANING = (
    "bound: the products, and the fewest bytes of the casts at the speed of the ceiling. "
    f"cached: weights are cast once in {MICROBATCHES} steps. "
    "other: the step less casts and products, which are timed by themselves. compiled: the step under torch.compile. "
    "Ratios are of times of one run; blank: not measured in it."
)


def tables(records: Sequence[Record]) -> list[Table]:
    """Return a table of all steps of models, and per policy and device a table of steps of expert layers."""
    steps = [case for cases in cases_of(records, "model_step").values() for case in cases]
    rows = [_model_row(record, case) for case in steps for record in case.values()]
    tables = [Table(_MODEL_COLUMNS, tuple(rows), repeated=2)] if rows else []
    places = {
        place: [(case, r) for case in cases for r in RECIPES if r in case]
        for place, cases in cases_of(records, "moe_step").items()
    }
    return tables + [_layers(cases, ", ".join(place) if len(places) > 1 else "") for place, cases in places.items() if cases]


def _us(record: Record, other: Record | None) -> float | None:
    """Return the time of another record of the same run."""
    return None if other is None or differing_run_fields(record, other) else other.time_us


def _model_row(record: Record, case: OfCase) -> Row:
    step, peer = record.time_us, "torchao_dense" if record.variant.endswith("_dense") else "torchao"
    return Row(
        (
            record.case,
            "compiled" if record.options.get("compiled") else "eager",
            "bf16" if record.variant == "baseline" else record.variant,
            None if step is None else step / 1e3,
            None if step is None else record.axes["T"] / step * 1e6,
            *(ratio(_us(record, case.get(name)), step) for name in ("baseline", peer)),
        ),
        record.reason,
    )


def _layers(rows: Sequence[tuple[OfCase, str]], title: str) -> Table:
    """Return the table of cases of an expert layer, each with a recipe: rows, and geometric means above them."""
    values = [_layer_values(*row) for row in rows]
    means = filter(None, (_means([row for row in values if row["recipe"] == recipe], recipe) for recipe in RECIPES))
    lines = [Row(tuple(row[c.csv_name] for c in _LAYER_COLUMNS), "" if row["step_us"] else "not timed") for row in values]
    return Table(_LAYER_COLUMNS, tuple(lines), tuple(means), (_MEANING,), repeated=2, title=title)


def _layer_values(case: OfCase, recipe: str) -> dict[str, CellValue]:
    """Return the values of a row by the keys of the columns; None where a part has no time."""
    record, base, peer = case[recipe], case.get("baseline"), case.get("torchao_rowwise")
    step, bf16 = record.time_us, _us(record, base)
    cached, refresh, casts = (_us(record, case.get(f"{recipe}_{part}")) for part in ("cached", "refresh", "casts"))
    # delayed multiplies operands and scales as tensorwise does
    products = _us(record, case.get("rowwise_gemms" if recipe == "rowwise" else "tensorwise_gemms"))
    whole = None if cached is None or refresh is None else cached + refresh / MICROBATCHES
    least = None if step is None or record.pct_ceiling is None else step * record.pct_ceiling / 100
    bound = None if products is None or least is None else products + least
    share = ratio(bound, step)
    return {
        "case": record.case,
        "groups": str(record.options.get("groups", "")),
        "recipe": recipe,
        "bf16_us": base.time_us if base else None,
        "torchao_us": peer.time_us if peer else None,
        "step_us": step,
        "times_bf16": ratio(bf16, step),
        "times_torchao": ratio(_us(record, peer), step),
        "pct_bound": None if share is None else 100 * share,
        "cached_us": whole,
        "cached_times_bf16": ratio(bf16, whole),
        "bound_us": bound,
        "casts_us": casts,
        "products_us": products,
        "other_us": None if step is None or casts is None or products is None else step - casts - products,
        "compiled_us": _us(record, case.get(f"{recipe}_compiled")),
        "torchao_commit": peer.commit if peer and base and peer.commit != base.commit else "",
    }


def _means(rows: Sequence[dict[str, CellValue]], recipe: str) -> str:
    """Return the geometric means of a recipe's rows; empty if no two records can be compared."""
    parts = []
    for peer in ("bf16", "torchao"):
        ratios = [float(r) for row in rows if (r := row[f"times_{peer}"]) is not None]
        if ratios:
            parts.append(f"{geometric_mean(ratios):.2f}x {peer} ({len(ratios)} case{'' if len(ratios) == 1 else 's'})")
    return f"{recipe}: {', '.join(parts)}" if parts else ""
