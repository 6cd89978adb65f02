"""`kerneltune replay`: searches run again on measured spaces, and how far from the optimum they end."""

import os
from functools import partial
from typing import Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import show, show_table
from kerneltune.cli.progress import reporter

_LEAST_SEEDS = 2


def command(
    space: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SPACE]...", help="Files, or parts of names of the shipped spaces; all if none."),
    ] = None,
    sampler: Annotated[
        str, typer.Option("--sampler", metavar="A,B", help=f"Some of {','.join(o.SAMPLERS)}.")
    ] = f"{o.SAMPLERS[0]},random",
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Searches of each sampler on each space.")] = 30,
    warm: Annotated[
        bool, typer.Option("--warm", help="Begin with the best of the nearest of these spaces, as `tune` does.")
    ] = False,
    results: o.Results = None,
) -> None:
    """Search measured spaces again, without a GPU, and show how far from the optimum the search ends.

    The gap after 10, 25, 50, 100 and 200 evaluations and at a quarter of the space: median over seeds and its 95 % interval, in
    per cent. Configs that give no time count as evaluations. Every CPU core runs a search; one of tpe takes minutes.
    """
    o.number("seeds", seeds, _LEAST_SEEDS)
    samplers = [o.choice("sampler", name, o.SAMPLERS) for name in sampler.split(",")]
    from kerneltune.search import spaces

    paths = spaces.find(space or [], o.results_root(results))
    if not paths:
        show(f"no measured spaces in {o.results_root(results)}/*/spaces")
        return
    from kerneltune.processes import side_by_side
    from kerneltune.search.replay import BUDGETS, nearest_best, replay

    measured = {path: spaces.read(path) for path in paths}
    for path, one in measured.items():
        first = nearest_best(one, list(measured.values())) if warm else []
        show(path.name.removesuffix(spaces.SUFFIX))
        show(f"{len(one.feasible)} of {len(one.trials)} configs have a time; {one.device}, {one.date[:10]}, commit {one.commit}")
        quarter = max(1, len(one.trials) // 4)
        rows = []
        with side_by_side(min(len(os.sched_getaffinity(0)), seeds)) as each, reporter() as progress:
            progress.stage("search", seeds * len(samplers))
            for name in samplers:
                ended = partial(progress.advance, name)
                gaps = replay(one, name, seeds, max(*BUDGETS, quarter), first, ended=ended, each=each)
                rows.append((name, *(_cell(gaps.at(n)) for n in (*BUDGETS, quarter))))
        show_table(("sampler", *(f"@{n}" for n in BUDGETS), f"@{quarter} (25 %)"), rows)
        show("")


def _cell(interval: object) -> str:
    from kerneltune.stats import Interval

    if not isinstance(interval, Interval):
        return ""
    return f"{100 * interval.median:.1f}\n{100 * interval.low:.1f}–{100 * interval.high:.1f}"
