"""`kerneltune insight`: what the trials of a family say about its knobs and its cases."""

from typing import Annotated, Any

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import show, show_table


def command(
    family: o.Family,
    op: o.OpNames = None,
    case: o.CaseNames = None,
    dtype: o.Dtypes = None,
    quant: o.Quants = None,
    variant: Annotated[str, typer.Option("--variant", metavar="NAME", help="Whose configs.")] = "optimized",
    policy: o.PolicyName = "cold",
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="Whose trials, as its folder is called; this one's if not given.")
    ] = None,
    results: o.Results = None,
) -> None:
    """Regret of every search, the knobs that matter, values that never win, ties, and the fewest configs for all cases."""
    o.choice("policy", policy, o.POLICIES)
    known = o.load_ops()
    from kerneltune import device
    from kerneltune.plan import Options, load_plan, results_root
    from kerneltune.search.trials import TrialStore, latest_fingerprint

    selection = o.make_selection(known, family, op, case, dtype, quant, [variant])
    folder = results_root(Options(results=results)) / "runs" / "trials" / (gpu or device.current().slug)
    groups: dict[tuple[str, str], list[tuple[Any, list[Any]]]] = {}
    for entry in (e for e in load_plan(known, selection).bench if selection.takes(e)):
        path = folder / f"{entry.op}.jsonl"
        store = TrialStore(path, **latest_fingerprint(path))
        chosen = next((v for v in known[entry.op].variants if v.name == variant), None)
        stored = store.of_case(known[entry.op], entry.case, chosen, policy) if chosen is not None else []
        if any(s.trial.time_us is not None for s in stored):
            groups.setdefault((entry.op, entry.case.quant), []).append((entry.case, stored))
    if not groups:
        show(f"no trials of {family} in {folder}")
        return
    for (name, mode), found in groups.items():
        _show_group(f"{name} {variant} {mode}", found)


def _show_group(title: str, found: list[tuple[Any, list[Any]]]) -> None:
    from kerneltune.search import insight

    show(title)
    cases = [{tuple(s.config.items()): s.trial.time_us for s in stored if s.trial.time_us is not None} for _, stored in found]
    rows = []
    for (case, stored), times in zip(found, cases, strict=True):
        gaps = insight.regret([s.trial.time_us for s in stored])
        to_near = next(i for i, gap in enumerate(gaps, start=1) if gap <= insight.NEAR)
        matter = insight.importances(times)
        top = " ".join(f"{knob} {100 * share:.0f}%" for knob, share in list(matter.items())[:2])
        counts = (str(len(stored)), str(to_near), str(len(insight.ties(times))))
        rows.append((f"{case.name} {case.dtype}", f"{min(times.values()):.2f}", *counts, insight.sparkline(gaps, 16), top))
    show_table(("case", "best µs", "trials", "to 2 %", "ties", "regret", "knobs that matter"), rows)
    for value in insight.dead_values(cases):
        show(f"never within 2 %: {value.knob}={value.value}; without it {100 * value.saving:.0f} % fewer configs")
    few = insight.portfolio(cases)
    how = "" if few.exact else ", greedily chosen"
    count = "1 config keeps" if len(few.configs) == 1 else f"{len(few.configs)} configs keep"
    show(f"{count} every case ({len(cases)}) within 2 % of its best (worst {100 * few.worst:.1f} %{how}):")
    for knobs in few.configs:
        show("  " + " ".join(f"{knob}={value}" for knob, value in knobs))
    show("")
