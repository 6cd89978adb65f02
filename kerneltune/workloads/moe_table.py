"""Where the time of a training step goes, and how near it is to its bound: a table made of records.

Pure: imports no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

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


@dataclass(frozen=True, slots=True)
class StepRow:
    """A recipe on a case; times in microseconds, None where a part has no time.

    Attributes:
        bound: its products alone, and the bytes that its casts must move at the speed of the ceiling.
        cached: a step of which its share of casting the weights is one in `microbatches`.
        compiled: the step under torch.compile.
        elsewhere: the commit that torchao was measured at, where bf16 was not.
        times_bf16, times_cached, times_torchao: how many times as long bf16 takes as the step and as `cached`, and torchao as the
            step; None where they are of different runs.
    """

    case: str
    groups: str
    policy: str
    device: str
    recipe: str
    bf16: float | None
    torchao: float | None
    step: float | None
    bound: float | None
    cached: float | None
    casts: float | None
    products: float | None
    compiled: float | None
    elsewhere: str = ""
    times_bf16: float | None = None
    times_cached: float | None = None
    times_torchao: float | None = None

    @property
    def other(self) -> float | None:
        """Return what is left of the step without casts and products; below 0 where parts overlap."""
        if self.step is None or self.casts is None or self.products is None:
            return None
        return self.step - self.casts - self.products


def step_rows(records: Iterable[Record], microbatches: int = MICROBATCHES) -> list[StepRow]:
    """Return a row per case and recipe of the records of `moe_step`, in their order; the last record of a kind counts."""
    cases: dict[object, dict[str, Record]] = {}
    for record in records:
        if record.op == "moe_step":
            cases.setdefault((record.key, record.device), {})[record.variant] = record
    return [_row(found, recipe, microbatches) for found in cases.values() for recipe in RECIPES if recipe in found]


def _row(found: dict[str, Record], recipe: str, microbatches: int) -> StepRow:
    def time(variant: str) -> float | None:
        return found[variant].time_us if variant in found else None

    def beside(variant: str) -> float | None:
        """Return the time of a variant of the step's run."""
        return None if variant not in found or other_run(record, found[variant]) else found[variant].time_us

    record = found[recipe]
    step, cached, refresh = record.time_us, beside(f"{recipe}_cached"), beside(f"{recipe}_refresh")
    products = beside("rowwise_gemms" if recipe == "rowwise" else "tensorwise_gemms")  # of the same operands and scales
    whole = None if cached is None or refresh is None else cached + refresh / microbatches
    least = None if step is None or record.pct_ceiling is None else step * record.pct_ceiling / 100
    return StepRow(
        case=record.case,
        groups=str(record.options.get("groups", "")),
        policy=record.policy,
        device=record.device,
        recipe=recipe,
        bf16=time("baseline"),
        torchao=time("torchao_rowwise"),
        step=step,
        bound=None if products is None or least is None else products + least,
        cached=whole,
        casts=beside(f"{recipe}_casts"),
        products=products,
        compiled=beside(f"{recipe}_compiled"),
        elsewhere=_elsewhere(found.get("torchao_rowwise"), found.get("baseline")),
        times_bf16=ratio(beside("baseline"), step),
        times_cached=ratio(beside("baseline"), whole),
        times_torchao=ratio(beside("torchao_rowwise"), step),
    )


def _elsewhere(peer: Record | None, base: Record | None) -> str:
    return peer.commit if peer is not None and base is not None and peer.commit != base.commit else ""


def tables(records: Sequence[Record]) -> list[Table]:
    """Return a table per policy and device: a row per case and recipe, what its columns mean, and the geometric means."""
    rows = step_rows(records)
    places = list(dict.fromkeys((row.policy, row.device) for row in rows))
    return [_table([row for row in rows if (row.policy, row.device) == place], place, len(places) > 1) for place in places]


def _table(rows: Sequence[StepRow], place: tuple[str, str], is_named: bool) -> Table:
    lines = tuple(Row(_values(row), "" if row.step is not None else "not timed") for row in rows)
    means = tuple(filter(None, (_means(rows, recipe) for recipe in RECIPES)))
    return Table(_COLUMNS, lines, means, (_MEANING,), repeated=2, title=", ".join(place) if is_named else "")


_MEANING = (
    "bound: the products, and the fewest bytes of the casts at the speed of the ceiling. "
    f"cached: weights are cast once in {MICROBATCHES} steps. "
    "other: the step less casts and products, which are timed by themselves. compiled: the step under torch.compile. "
    "Ratios are of times of one run; blank: not measured in it."
)


def _values(row: StepRow) -> tuple[str | float | None, ...]:
    share = ratio(row.bound, row.step)
    return (
        row.case, row.groups, row.recipe, row.bf16, row.torchao, row.step, row.times_bf16, row.times_torchao,
        None if share is None else 100 * share, row.cached, row.times_cached, row.bound, row.casts, row.products, row.other,
        row.compiled, row.elsewhere,
    )  # fmt: skip


def _means(rows: Iterable[StepRow], recipe: str) -> str:
    """Return the geometric means of a recipe; empty where there is nothing to compare."""
    mine = [row for row in rows if row.recipe == recipe]
    parts = []
    for peer in ("bf16", "torchao"):
        found = [r for row in mine if (r := getattr(row, f"times_{peer}")) is not None]
        if found:
            parts.append(f"{geometric_mean(found):.2f}x {peer} ({len(found)} case{'' if len(found) == 1 else 's'})")
    return f"{recipe}: {', '.join(parts)}" if parts else ""
