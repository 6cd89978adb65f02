"""`kerneltune versus`: one case tuned by kerneltune and by other tuners, over the same configs on this machine."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import note, show, show_table
from kerneltune.cli.progress import reporter


def command(
    family: o.Family,
    op: o.OpNames = None,
    case: o.CaseNames = None,
    dtype: o.Dtypes = None,
    quant: o.Quants = None,
    variant: Annotated[str, typer.Option("--variant", metavar="NAME", help="Whose configs.")] = "optimized",
    policy: o.PolicyName = "cold",
    restrict: Annotated[
        list[str] | None,
        typer.Option("--restrict", metavar="NAME=V1,V2", help="Only these values of a knob; may be repeated."),
    ] = None,
    budget: o.Budget = None,
    trials: o.Trials = None,
    sampler: o.Sampler = None,
    until_gain: Annotated[
        str, typer.Option("--until-gain", metavar="PERCENT", help="Our search stops when the rest is expected to gain less.")
    ] = "0.5%",
    helion_budget: Annotated[
        float | None,
        typer.Option(
            "--helion-budget", metavar="SECONDS", help="Helion stops then; its best so far counts. No limit if not given."
        ),
    ] = None,
    results: o.Results = None,
    workers: o.Workers = None,
) -> None:
    """Tune the first selected case with kerneltune, @triton.autotune over the whole space, and Helion where it is installed.

    Each starts with nothing compiled, in a process of its own. What they choose is timed in one interleaved run, beside the
    default and the best few of every ranking. Written to results/<gpu>/versus; the config cache stays as it is. Interrupted, the
    same command goes on with the tuner that had not ended.
    """
    results = o.results_root(results, family)
    known = o.load_ops()
    from kerneltune.plan import load_plan, require_gpu
    from kerneltune.search.loop import Search
    from kerneltune.tuning import versus

    selection = o.make_selection(known, family, op, case, dtype, quant, [variant])
    options = o.make_options(policy, budget_s=budget, trials=trials, sampler=sampler, results=results, workers=workers)
    given = o.knobs("restrict", restrict)
    o.number("helion-budget", helion_budget, 1)
    search = Search(budget, trials, options.sampler, until_gain=o.percent("until-gain", until_gain))
    entry = next((e for e in load_plan(known, selection).bench if selection.takes(e)), None)
    if entry is None:
        raise ValueError("case: none selected: expected a bench case of the sweep")
    chosen = known[entry.op]
    contender = chosen.variant(variant)
    require_gpu("versus")
    o.require_writable(results)
    with reporter() as progress:
        limit_s = None if helion_budget is None else round(helion_budget)
        found = versus.contest(chosen, entry.case, contender, given, search, options, progress, limit_s=limit_s)
    show(f"{found.op} {found.variant} {found.case.label}: {found.configs} configs")
    show_table(versus.HEAD, [versus.cells(line) for line in versus.plain(found)])
    if found.share is not None:
        show(f"wall time {found.share:.2f} of the exhaustive search")
    for path in versus.keep(found, [Path(sys.argv[0]).name, *sys.argv[1:]], options):
        note(f"wrote {path}")
