"""Where the time of a training step goes, and how near it is to its bound: a table made of records.

Pure; imports cells, records and stats, not torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from kerneltune.cells import aligned, number, ratio, wrapped
from kerneltune.records import Record, other_run
from kerneltune.stats import geometric_mean

RECIPES = ("tensorwise", "rowwise", "delayed")
_HEAD = (
    "case", "groups", "bf16 µs", "torchao µs", "recipe", "step µs", "bound µs", "%", "x bf16", "x torchao",
    "cached µs", "x bf16", "casts µs", "products µs", "other µs", "compiled µs",
)  # fmt: skip
_SHARED = 4
"""Columns that the recipes of a case share."""
_IN_LINE = slice(_SHARED, -1)
"""Columns for which 80 of text have room."""
_TEXTS = ("case", "groups", "recipe")


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

    def beside(variant: str) -> float | None:
        """The same, of the step's run."""
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


def step_text(rows: Sequence[StepRow], microbatches: int = 8, width: int = 80) -> str:
    """A table of 80 columns per case, what its columns mean, and the geometric means."""
    cells = {id(row): _cells(row)[_IN_LINE] for row in rows}
    head = [name.removesuffix(" µs") for name in _HEAD[_IN_LINE]]
    widths = [max(map(len, column)) for column in zip(head, *cells.values(), strict=True)]
    apart = _apart(rows)
    lines = []
    for (case, groups, measured, bf16, torchao), of_case in groupby(
        rows, key=lambda row: (row.case, row.groups, (row.policy, row.device), _us(row.bf16), _torchao(row))
    ):
        found = list(of_case)
        title = f"{case}, {groups} groups{apart[measured]}"
        lines += wrapped(f"{title}: bf16 {bf16 or '-'} µs, torchao {torchao or 'not measured'}", width)
        lines.append(aligned(head, widths, left=1))
        lines += [aligned(cells[id(row)], widths, left=1) for row in found]
        compiled = [f"{row.recipe} {_us(row.compiled)}" for row in found if row.compiled is not None]
        lines += [*(wrapped(f"compiled: {', '.join(compiled)}", width) if compiled else []), ""]
    lines += wrapped(_meaning(microbatches), width, "")
    means = [_means(rows, recipe, measured, name) for measured, name in apart.items() for recipe in RECIPES]
    return "\n".join([*lines, *filter(None, means)]) + "\n"


def step_markdown(rows: Sequence[StepRow], microbatches: int = 8) -> str:
    """The same for a README, without the means."""
    apart = _apart(rows)
    lines = [_HEAD, ["---" if name in _TEXTS else "---:" for name in _HEAD]]
    lines += [[row.case + apart[row.policy, row.device], *_cells(row)[1:]] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{_meaning(microbatches)}\n"


def _meaning(microbatches: int) -> str:
    """What the columns are."""
    return (
        "Times in µs. bound, and its share of the step: the products, and the casts' fewest bytes at the ceiling's speed. "
        f"cached: weights cast once in {microbatches} steps. "
        "other: the step less casts and products, which are timed by themselves. compiled: the step under torch.compile. "
        "Times are compared where they are of one run; blank: not measured in it."
    )


def _apart(rows: Iterable[StepRow]) -> dict[tuple[str, str], str]:
    """By policy and device, what tells the rows measured so from the others."""
    found = dict.fromkeys((row.policy, row.device) for row in rows)
    telling = [len(set(names)) > 1 for names in zip(*found, strict=True)]
    return {names: "".join(f", {n}" for n, tells in zip(names, telling, strict=True) if tells) for names in found}


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
        number(None if share is None else 100 * share, 1), number(row.times_bf16, 2), number(row.times_torchao, 2),
        _us(row.cached), number(row.times_cached, 2), _us(row.casts), _us(row.products), _us(row.other), _us(row.compiled),
    ]  # fmt: skip


def _means(rows: Iterable[StepRow], recipe: str, measured: tuple[str, str], name: str) -> str:
    """Of a recipe's rows of one policy and device; empty where there is nothing to compare."""
    mine = [row for row in rows if row.recipe == recipe and (row.policy, row.device) == measured]
    parts = []
    for peer in ("bf16", "torchao"):
        found = [r for row in mine if (r := getattr(row, f"times_{peer}")) is not None]
        if found:
            parts.append(f"{geometric_mean(found):.2f}x {peer} ({len(found)} case{'' if len(found) == 1 else 's'})")
    return f"{recipe}{name}: {', '.join(parts)}" if parts else ""


def _us(time_us: float | None) -> str:
    return number(time_us, 0)
