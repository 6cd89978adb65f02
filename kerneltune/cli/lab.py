"""`kerneltune lab …`: the experiments that judge kerneltune itself."""

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import deliver, note, show, show_table, width
from kerneltune.cli.progress import reporter

if TYPE_CHECKING:
    from kerneltune.lab.study import Process
    from kerneltune.plan import Options, Selection
    from kerneltune.spec import Op
    from kerneltune.stats import Interval
    from kerneltune.sweep import SweepCase

app = typer.Typer(
    no_args_is_help=True,
    help="Judge kerneltune itself: against other tuners, on measured spaces, under noise, with planted slowdowns.",
)
_LEAST_SEEDS = 2
_DISTURBED = 0.005
"""A busy compile pool may raise the noise floor by this much."""


@app.command("versus")
@o.selects("variant")
def versus(
    family: o.Family,
    wanted: "Selection",
    variant: o.Whose = "optimized",
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
            "--helion-budget",
            metavar="SECONDS",
            callback=o.at_least(1),
            help="Helion stops then; its best so far counts. No limit if not given.",
        ),
    ] = None,
    results: o.Results = None,
    workers: o.Workers = None,
) -> None:
    """Tune the first selected case with kerneltune, @triton.autotune over the whole space, and Helion where it is installed.

    Each tuner starts with nothing compiled, in a process of its own. The chosen configs are timed in one interleaved run, beside
    the default and the best few of every ranking. Writes results/<gpu>/versus; the config cache stays as it is. After an
    interruption the same command goes on with the next tuner.
    """
    results = o.results_root(results, family)
    known = o.load_ops()
    from kerneltune.lab import versus as contest
    from kerneltune.plan import require_gpu
    from kerneltune.search.loop import Search

    selection = o.make_selection(known, family, replace(wanted, variants=(variant,)))
    options = o.make_options(policy, budget_s=budget, trials=trials, sampler=sampler, results=results, workers=workers)
    given = o.knobs("restrict", restrict)
    search = Search(budget, trials, options.sampler, until_gain=o.percent("until-gain", until_gain))
    chosen, entry = _first_case(known, selection)
    contender = chosen.variant(variant)
    require_gpu("lab versus")
    o.require_writable(results)
    with reporter() as progress:
        limit_s = None if helion_budget is None else round(helion_budget)
        found = contest.contest(chosen, entry.case, contender, given, search, options, progress, limit_s=limit_s)
    show(f"{found.op} {found.variant} {found.case.label}: {found.configs} configs")
    show(contest.contest_table(asdict(found)["lines"]).text(width()))
    if found.share is not None:
        show(f"wall time {found.share:.2f} of the exhaustive search")
    for path in contest.keep(found, [Path(sys.argv[0]).name, *sys.argv[1:]], options):
        note(f"wrote {path}")


@app.command("replay")
def replay(
    space: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SPACE]...", help="Files, or parts of names of the shipped spaces; all if none."),
    ] = None,
    sampler: Annotated[
        str, typer.Option("--sampler", metavar="A,B", help=f"Some of {','.join(o.SAMPLERS)}.")
    ] = f"{o.SAMPLERS[0]},random",
    seeds: Annotated[
        int,
        o.count("--seeds", "Searches of each sampler on each space.", _LEAST_SEEDS),
    ] = 30,
    warm: Annotated[
        bool, typer.Option("--warm", help="Begin with the best of the nearest of these spaces, as `tune` does.")
    ] = False,
    results: o.Results = None,
) -> None:
    """Search measured spaces again, without a GPU, and show how far from the optimum the search ends.

    The gap after 10, 25, 50, 100 and 200 evaluations and at a quarter of the space: median over seeds and its 95 % interval, in
    per cent. Configs that give no time count as evaluations. Every CPU core runs a search.
    """
    samplers = [o.choice("sampler", name, o.SAMPLERS) for name in sampler.split(",")]
    from kerneltune.search import spaces
    from kerneltune.sweep import recorded_root

    root = recorded_root(results)
    paths = spaces.find(space or [], root)
    if not paths:
        show(f"no measured spaces in {root}/*/spaces")
        return
    from kerneltune.lab.replay import BUDGETS, gap_at, nearest_best
    from kerneltune.lab.replay import replay as run
    from kerneltune.processes import side_by_side

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
                gaps = run(one, name, seeds, max(*BUDGETS, quarter), first, ended=ended, each=each)
                rows.append((name, *(_gap(gap_at(gaps, n)) for n in (*BUDGETS, quarter))))
        show_table(("sampler", *(f"@{n}" for n in BUDGETS), f"@{quarter}"), rows)
        show("")


def _gap(interval: "Interval | None") -> str:
    if interval is None:
        return ""
    return f"{100 * interval.median:.1f} ({100 * interval.low:.1f}–{100 * interval.high:.1f})"


@app.command("noise")
@o.selects("variant")
def noise(
    family: o.Family,
    wanted: "Selection",
    policy: o.PolicyName = "cold",
    workers: o.Workers = None,
) -> None:
    """Time a config against itself, with the compile pool idle and busy.

    Takes the first selected case. The measuring process has a core of its own, the pool has the others. Exit code 1 if the floor
    with a busy pool exceeds that with an idle pool by 0.5 %.
    """
    known = o.load_ops()
    from kerneltune.lab.noise import disturbance
    from kerneltune.plan import require_gpu

    selection = o.make_selection(known, family, replace(wanted, variants=("optimized",) if wanted.ops else ()))
    options = o.make_options(policy, workers=workers)
    chosen, entry = _first_case(known, selection)
    require_gpu("lab noise")
    variant = next((v for v in reversed(chosen.variants) if v.config is not None and not v.is_peer), None)
    if variant is None:
        raise ValueError(f"{chosen.name}: no variant of ours has knobs: expected an operator with one that has")
    idle, busy = disturbance(chosen, entry.case, variant, variant.default_config(entry.case), options)
    show(f"{chosen.name} {variant.name} {entry.case.label}, default config against itself")
    rows = []
    for name, state in (("idle", idle), ("busy", busy)):
        rows.append((name, f"{state.time_us.median:.2f}", f"{100 * state.floor:.2f} %", f"{100 * state.spread:.2f} %"))
    show_table(("compile pool", "time µs", "A/A floor", "p10–p90 spread"), rows)
    if busy.floor > idle.floor + _DISTURBED:
        raise typer.Exit(1)


@app.command("study")
@o.selects()
def study(
    wanted: "Selection",
    family: Annotated[str | None, typer.Argument(help="A file of sweeps/ by name, or a path ending in .yaml.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Decide on what --save kept; needs no GPU.")
    ] = None,
    policy: o.PolicyName = "cold",
    processes: Annotated[int, o.count("--processes", "Fresh processes to measure in.")] = 12,
    per_side: Annotated[int, o.count("--per-side", "Processes of a gate run.")] = 3,
    repeats: Annotated[int, o.count("--repeats", "Decisions per row.")] = 20,
    margin: Annotated[float, typer.Option("--margin", metavar="FRACTION", help="Slowdown that is tolerated.")] = 0.03,
    delay: Annotated[
        list[float] | None,
        typer.Option(
            "--delay",
            metavar="FRACTION",
            callback=o.at_least(0.001),
            help="Slowdown to plant; may be repeated. 0.02, 0.05, 0.1 if not given.",
        ),
    ] = None,
    save: Annotated[Path | None, typer.Option("--save", metavar="DIR", help="Keep what was measured.")] = None,
    style: o.Style = "text",
    output: o.Output = None,
    configs: o.Configs = None,
) -> None:
    """Measure variants against themselves and against themselves with planted delays, and let the gate judge.

    Nothing planted: every regression is a false alarm. Planted, in one row of ten: `short` rows become no more than 0.5 µs
    slower, which the gate lets pass by its rule; `caught` is the part of the others called a regression.
    """
    if (family is None) == (source is None):
        raise ValueError(f"family: {repr(family) if family else 'missing'}: expected a family or --from, one of them")
    if source is None and processes < 3 * per_side:
        raise ValueError(f"processes: {processes}: expected {3 * per_side} or more")
    if save is not None:
        o.require_writable(save)
    from kerneltune.lab import study as judged

    if source is not None:
        measured = judged.saved(source)
    else:
        from kerneltune import sweep

        sweep.find(str(family))
        selection = o.make_selection(o.load_ops(), str(family), wanted)
        measured = _measured(selection, o.make_options(policy, peers=False, configs=configs), processes, delay)
    if save is not None:
        judged.save(save, measured)
        note(f"wrote {save}")
    rows = judged.decide(measured, per_side=per_side, repeats=repeats, margin=margin)
    deliver(judged.study_table(rows).render(style, width()), output)


def _measured(selection: "Selection", options: "Options", processes: int, delays: list[float] | None) -> "list[Process]":
    """Return what the processes of this GPU measured."""
    from kerneltune.lab import study as measuring

    with reporter() as progress:
        return measuring.measure(o.load_ops, selection, options, processes, sorted(set(delays or measuring.DELAYS)), progress)


def _first_case(known: "Mapping[str, Op]", selection: "Selection") -> "tuple[Op, SweepCase]":
    """Return the first selected bench case and its operator.

    Raises:
        ValueError: no bench case is selected.
    """
    from kerneltune.plan import load_plan

    entry = next((entry for entry in load_plan(known, selection).bench if selection.takes(entry)), None)
    if entry is None:
        raise ValueError("case: none selected: expected a bench case of the sweep")
    return known[entry.op], entry
