"""Where the time of a training step goes, and how near it is to its bound: a table made of records.

Pure; imports cells, records and stats, not torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kerneltune.cells import aligned, number, ratio, wrapped
from kerneltune.records import Record
from kerneltune.stats import geometric_mean

RECIPES = ("tensorwise", "rowwise", "delayed")
_HEAD = (
    "case", "groups", "bf16 µs", "torchao µs", "recipe", "step µs", "bound µs", "%", "x bf16", "x torchao",
    "cached µs", "x bf16", "casts µs", "products µs", "other µs",
)  # fmt: skip
_SHARED = 4
"""Columns that the recipes of a case share."""
_TEXTS = ("case", "groups", "recipe")


@dataclass(frozen=True, slots=True)
class StepRow:
    """A recipe on a case; times in microseconds, None where a part has no time.

    Attributes:
        bound: its products alone, and the bytes that its casts must move at the speed of the ceiling.
        cached: a step of which its share of casting the weights is one in `microbatches`.
        elsewhere: the commit that torchao was measured at, where bf16 was not.
    """

    case: str
    groups: str
    recipe: str
    bf16: float | None
    torchao: float | None
    step: float | None
    bound: float | None
    cached: float | None
    casts: float | None
    products: float | None
    elsewhere: str = ""

    @property
    def other(self) -> float | None:
        """What is left of the step without casts and products; below 0 where parts overlap."""
        if self.step is None or self.casts is None or self.products is None:
            return None
        return self.step - self.casts - self.products


def step_rows(records: Iterable[Record], microbatches: int = 8) -> list[StepRow]:
    """A row per case and recipe of the records of `moe_step`, in their order; the last record of a kind counts."""
    cases: dict[object, dict[str, Record]] = {}
    for record in records:
        if record.op == "moe_step":
            cases.setdefault((record.key, record.device), {})[record.variant] = record
    return [_row(found, recipe, microbatches) for found in cases.values() for recipe in RECIPES if recipe in found]


def _row(found: dict[str, Record], recipe: str, microbatches: int) -> StepRow:
    def time(variant: str) -> float | None:
        return found[variant].time_us if variant in found else None

    step, cached, refresh = (time(f"{recipe}{part}") for part in ("", "_cached", "_refresh"))
    products = time("rowwise_gemms" if recipe == "rowwise" else "tensorwise_gemms")  # of the same operands and scales
    record = found[recipe]
    least = None if step is None or record.pct_ceiling is None else step * record.pct_ceiling / 100
    return StepRow(
        case=record.case,
        groups=str(record.options.get("groups", "")),
        recipe=recipe,
        bf16=time("baseline"),
        torchao=time("torchao_rowwise"),
        step=step,
        bound=None if products is None or least is None else products + least,
        cached=None if cached is None or refresh is None else cached + refresh / microbatches,
        casts=time(f"{recipe}_casts"),
        products=products,
        elsewhere=_elsewhere(found.get("torchao_rowwise"), found.get("baseline")),
    )


def _elsewhere(peer: Record | None, base: Record | None) -> str:
    return peer.commit if peer is not None and base is not None and peer.commit != base.commit else ""


def step_text(rows: Sequence[StepRow], microbatches: int = 8, width: int = 80) -> str:
    """A table of 80 columns per case, what its columns mean, and the geometric means."""
    cells = {id(row): _cells(row)[_SHARED:] for row in rows}
    head = [name.removesuffix(" µs") for name in _HEAD[_SHARED:]]
    widths = [max(map(len, column)) for column in zip(head, *cells.values(), strict=True)]
    lines = []
    for (case, groups, bf16, torchao), found in groupby(
        rows, key=lambda row: (row.case, row.groups, _us(row.bf16), _torchao(row))
    ):
        lines += wrapped(f"{case}, {groups} groups: bf16 {bf16 or '-'} µs, torchao {torchao or 'not measured'}", width)
        lines.append(aligned(head, widths, left=1))
        lines += [*(aligned(cells[id(row)], widths, left=1) for row in found), ""]
    meaning = "bound, and its share of the step: the products, and the casts' fewest bytes at the ceiling's speed."
    cached = f"cached: weights cast once in {microbatches} steps."
    other = "other: the step less casts and products, which are timed by themselves."
    lines += wrapped(f"Times in µs. {meaning} {cached} {other}", width, "")
    return "\n".join([*lines, *(_means(rows, recipe) for recipe in RECIPES)]).rstrip() + "\n"


def step_markdown(rows: Sequence[StepRow]) -> str:
    """The same for a README."""
    lines = [_HEAD, ["---" if name in _TEXTS else "---:" for name in _HEAD], *(_cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _torchao(row: StepRow) -> str:
    """torchao's time, and its commit where that is not bf16's: then the two are of different runs."""
    if row.torchao is None:
        return ""
    return f"{_us(row.torchao)} µs" + (f", of commit {row.elsewhere}" if row.elsewhere else "")


def _cells(row: StepRow) -> list[str]:
    share = ratio(row.bound, row.step)
    torchao = _us(row.torchao) + (f" ({row.elsewhere})" if row.elsewhere else "")
    return [
        row.case, row.groups, _us(row.bf16), torchao, row.recipe, _us(row.step), _us(row.bound),
        number(None if share is None else 100 * share, 1), _times(row.bf16, row.step), _times(row.torchao, row.step),
        _us(row.cached), _times(row.bf16, row.cached), _us(row.casts), _us(row.products), _us(row.other),
    ]  # fmt: skip


def _means(rows: Sequence[StepRow], recipe: str) -> str:
    parts = []
    for name in ("bf16", "torchao"):
        found = [r for row in rows if row.recipe == recipe and (r := ratio(getattr(row, name), row.step)) is not None]
        if found:
            parts.append(f"{geometric_mean(found):.2f}x {name} ({len(found)} cases)")
    return f"{recipe}: {', '.join(parts)}" if parts else ""


def _times(a: float | None, b: float | None) -> str:
    return number(ratio(a, b), 2)


def _us(time_us: float | None) -> str:
    return number(time_us, 0)
