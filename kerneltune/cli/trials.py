"""`kerneltune trials`: what the trials of a family say about its knobs and its cases."""

import statistics
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import show, show_table, show_wrapped
from kerneltune.rounding import cdiv
from kerneltune.table import pairs

if TYPE_CHECKING:
    from kerneltune.plan import Selection
    from kerneltune.search.insight import Portfolio
    from kerneltune.search.trials import Searches

_WEIGHED = 8
"""Cases of which it is asked which knobs matter, where only a short answer is wanted."""


@o.selects("variant")
def command(
    family: o.Family,
    wanted: "Selection",
    variant: Annotated[str, typer.Option("--variant", metavar="NAME", help="Whose configs.")] = "optimized",
    policy: o.PolicyName = "cold",
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Whose trials, as its folder is called; this one's if not given.")
    ] = None,
    results: o.Results = None,
) -> None:
    """Show what past trials say: how good each search was, the knobs that matter, and the fewest configs for all cases."""
    known = o.load_ops()
    from kerneltune import device
    from kerneltune.plan import load_plan
    from kerneltune.search.trials import searches_below

    selection = o.make_selection(known, family, replace(wanted, variants=(variant,)))
    folder = o.results_root(results, family) / "runs" / "trials" / (gpu or device.current().slug)
    cases = [(known[entry.op], entry.case) for entry in load_plan(known, selection).bench if selection.takes(entry)]
    found = searches_below(folder, cases, selection.takes_variant, policy)
    if not found:
        show_wrapped(f"no trials of {family} in {folder}: `kerneltune tune {family}` makes them, on a GPU")
        return
    for title, searches in found.items():
        _show_group(title, searches)


def _times(searches: "Searches") -> list[dict[Any, float]]:
    from kerneltune.search.loop import times_of

    return [times_of(stored) for _, stored in searches]


def show_short(title: str, searches: "Searches") -> None:
    """Summarize the trials in a few lines."""
    from kerneltune.search import insight

    cases = _times(searches)
    gaps = [insight.regret([one.time_us for one in stored.values()]) for _, stored in searches]
    near = [next(i for i, gap in enumerate(of_case, start=1) if gap <= insight.NEAR) for of_case in gaps]
    status = Counter(one.status for _, stored in searches for one in stored.values())
    counts = ", ".join(f"{count} {name}" for name, count in status.most_common())
    show_wrapped(f"{title}: {len(cases)} cases, {status.total()} trials ({counts})")
    ties = statistics.median(len(insight.ties(times)) for times in cases)
    evaluations = statistics.median(len(of_case) for of_case in gaps)
    show_wrapped(
        f"  within 2 % of the best after {statistics.median(near):.0f} of {evaluations:.0f} trials (median; worst {max(near)}); "
        f"{ties:.0f} configs tie"
    )
    weights: Counter[str] = Counter()
    for times in cases[:: cdiv(len(cases), _WEIGHED)]:
        weights.update(insight.importances(times))
    if weights.total():
        shares = (f"{knob} {100 * weight / weights.total():.0f} %" for knob, weight in weights.most_common(3))
        show_wrapped(f"  knobs that matter: {', '.join(shares)}")
    dead = [f"{value.knob}={value.value} (-{100 * value.saving:.0f} % configs)" for value in insight.dead_values(cases)]
    if dead:
        show_wrapped(f"  never within 2 %: {', '.join(dead[:4])}" + (f" and {len(dead) - 4} more" if len(dead) > 4 else ""))
    few = insight.portfolio(cases)
    show_wrapped(f"  {_portfolio(few, len(cases))}")


def _portfolio(few: "Portfolio", cases: int) -> str:
    how = "" if few.exact else ", perhaps not the fewest"
    count = "1 config keeps" if len(few.configs) == 1 else f"{len(few.configs)} configs keep"
    return f"{count} every case ({cases}) within 2 % of its best (worst {100 * few.worst:.1f} %{how})"


def _show_group(title: str, found: "Searches") -> None:
    from kerneltune.search import insight

    show(title)
    cases = _times(found)
    rows = []
    for (case, stored), times in zip(found, cases, strict=True):
        gaps = insight.regret([one.time_us for one in stored.values()])
        to_near = next(i for i, gap in enumerate(gaps, start=1) if gap <= insight.NEAR)
        matter = insight.importances(times)
        top = " ".join(f"{knob} {100 * share:.0f}%" for knob, share in list(matter.items())[:2])
        counts = (str(len(stored)), str(to_near), str(len(insight.ties(times))))
        rows.append((f"{case.name} {case.dtype}", f"{min(times.values()):.2f}", *counts, insight.sparkline(gaps, 16), top))
    show_table(("case", "best µs", "trials", "to 2 %", "ties", "regret", "knobs that matter"), rows)
    for value in insight.dead_values(cases):
        show_wrapped(f"never within 2 %: {value.knob}={value.value}; without it {100 * value.saving:.0f} % fewer configs")
    few = insight.portfolio(cases)
    show_wrapped(f"{_portfolio(few, len(cases))}:")
    for knobs in few.configs:
        show_wrapped("  " + pairs(dict(knobs)))
    show("")
