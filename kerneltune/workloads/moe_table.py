"""Where the time of a training step goes, and how near it is to its bound: a table made of records.

Pure; imports records and stats, not torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kerneltune.records import Record
from kerneltune.stats import geometric_mean

RECIPES = ("tensorwise", "rowwise", "delayed")
_HEAD = (
    "case", "groups", "recipe", "bf16 µs", "torchao µs", "step µs", "bound µs", "% bound", "x bf16", "x torchao",
    "cached µs", "x bf16", "casts µs", "products µs", "other µs",
)  # fmt: skip
_TEXTS = 3


@dataclass(frozen=True, slots=True)
class StepRow:
    """A recipe on a case; times in microseconds, None where a part has no time.

    Attributes:
        bound: its products alone, and the bytes that its casts must move at the speed of the ceiling.
        cached: a step of which its share of casting the weights is one in `microbatches`.
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
    )


def step_text(rows: Sequence[StepRow], microbatches: int = 8) -> str:
    """The table, what its columns mean, and the geometric means."""
    cells = [_cells(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(_HEAD, *cells, strict=True)]
    lines = [_line(line, widths) for line in (_HEAD, *cells)]
    lines += ["", "bound: the products alone, and the casts' fewest bytes at the ceiling's speed."]
    lines.append(f"cached: with weights cast once in {microbatches} microbatches, that cast's share included.")
    return "\n".join([*lines, *(_means(rows, recipe) for recipe in RECIPES)]).rstrip() + "\n"


def step_markdown(rows: Sequence[StepRow]) -> str:
    """The same for a README."""
    lines = [_HEAD, ["---"] * _TEXTS + ["---:"] * (len(_HEAD) - _TEXTS), *(_cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cells(row: StepRow) -> list[str]:
    share = _ratio(row.bound, row.step)
    return [
        row.case, row.groups, row.recipe, _us(row.bf16), _us(row.torchao), _us(row.step), _us(row.bound),
        "" if share is None else f"{100 * share:.1f}", _times(row.bf16, row.step), _times(row.torchao, row.step),
        _us(row.cached), _times(row.bf16, row.cached), _us(row.casts), _us(row.products), _us(row.other),
    ]  # fmt: skip


def _means(rows: Sequence[StepRow], recipe: str) -> str:
    parts = []
    for name in ("bf16", "torchao"):
        found = [r for row in rows if row.recipe == recipe and (r := _ratio(getattr(row, name), row.step)) is not None]
        if found:
            parts.append(f"{geometric_mean(found):.2f}x {name} ({len(found)} cases)")
    return f"{recipe}: {', '.join(parts)}" if parts else ""


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def _times(a: float | None, b: float | None) -> str:
    ratio = _ratio(a, b)
    return "" if ratio is None else f"{ratio:.2f}"


def _us(time_us: float | None) -> str:
    return "" if time_us is None else f"{time_us:.0f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:_TEXTS], widths[:_TEXTS], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[_TEXTS:], widths[_TEXTS:], strict=True)]
    return "  ".join([*left, *right]).rstrip()
