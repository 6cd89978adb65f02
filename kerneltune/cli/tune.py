"""`kerneltune tune`: search the best configs of a family, and keep the winners of the paired finals."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kerneltune import device
from kerneltune.cli import cases, loading
from kerneltune.cli import options as o
from kerneltune.cli.console import error_line, note, show, show_wrapped
from kerneltune.cli.progress import Reporter
from kerneltune.cli.trials import searches_of, show_searches
from kerneltune.plan import Plan, Selection
from kerneltune.processes.start import start_server
from kerneltune.progress import Progress
from kerneltune.records import grouped
from kerneltune.sweep_file import results_root
from kerneltune.wording import counted

if TYPE_CHECKING:
    from kerneltune.tune.session import TuningResult

_CALLED_VARIANT = "optimized"
"""Variant that a call of an operator runs, the only variant whose configs a model uses."""


@dataclass(frozen=True)
class Search:
    """Hold the options that the folder of a capture does not take."""

    policy: o.PolicyName = None
    trials: o.Trials = None
    stale: Annotated[bool, o.flag("--stale", "Search again what was chosen with another source, driver or packages.")] = False
    until_gain: Annotated[
        str | None, o.option("--until-gain", "PERCENT", "Stop when the rest is expected to gain less: 1%, or off.")
    ] = None
    gpus: Annotated[str, o.option("--gpus", "all|N", "GPUs of this host; each tunes one case at a time.")] = ""


@o.ungrouped()
def command(
    family: Annotated[str | None, typer.Argument(help="A file of sweeps/ by name, a .yaml file, or a capture's folder.")] = None,
    model: Annotated[
        Path | None, o.option("--model", "FILE", "Tune the operators that the model of a Hugging Face config.json uses.")
    ] = None,
    *,
    work: cases.Work,
    selection: Selection,
    search: Search,
    budget: o.Budget = None,
    force: Annotated[bool, o.flag("--force", "Search again what has a config, ran out of memory or crashed.")] = False,
    share: Annotated[
        float | None, o.option("--share", "FRACTION", "In a capture, tune classes until they cover this part of the time.")
    ] = None,
    dry_run: Annotated[bool, o.flag("--dry-run", "Only say how many configs there are, and about how long they take.")] = False,
    configs: o.Configs = None,
    results: o.Results = None,
    workers: o.Workers = None,
) -> None:
    """Search the best config of every case of a family, or of every launch in the folder of a capture.

    A config replaces the present config only if it is measurably faster. Every trial is kept, so an interrupted search resumes.
    The command ends with a summary of the trials; `kerneltune trials` says more. A search stops when the
    untried configs are expected to be less than 1 % faster; --until-gain changes that. With --model the cases are the output of
    `kerneltune cases`, and only the variant that calls run is tuned, unless --variant names another. Exit code 1 where a case
    that this GPU can run was not tuned.
    """
    o.use_configs(configs)
    if (family is None) == (model is None):
        raise ValueError(f"family: {repr(family) if family else 'missing'}: expected either a family or --model FILE")
    if model is not None:
        family = str(cases.write_sweep(results_root(results), model, work))
        selection = replace(selection, variants=selection.variants or (_CALLED_VARIANT,))
    else:
        o.refuse("expected only with --model", **o.given(work))
    assert family is not None
    if Path(family).is_dir():
        from kerneltune.cli.captures import tune_folder

        o.refuse("expected without the folder of a capture", **o.given(selection), **o.given(search))
        return tune_folder(Path(family), budget, share, force, workers, dry_run)
    o.refuse("expected only with the folder of a capture", share=share)
    if not dry_run:
        start_server()  # its imports run beside the imports of this process and take as long
    options = vars(search) | {"budget_s": budget, "results": results, "workers": workers}
    stale = options.pop("stale")
    options["retune"] = "all" if force else ("stale" if stale else None)
    options["until_gain"] = 0.0 if search.until_gain == "off" else o.percent("until-gain", search.until_gain)
    plan = loading.make_plan(family, selection, **options)
    if not plan.cases():
        raise ValueError(f"{plan.sweep.path}: no bench case selected")
    if dry_run:
        return _show_forecast(plan)
    _search(plan)


def _search(plan: Plan) -> None:
    """Search the cases of a plan, and show a summary of the trials and the outcome."""
    loading.require_folders(plan.options)
    from kerneltune.tune.run import run_tune

    with Reporter() as progress:
        tuned = run_tune(plan, progress)
    if any(result.entry for result in tuned):
        for title, searches in searches_of(plan, device.current().slug).items():
            show_searches(title, searches)
    _show_outcome(tuned)


def _show_forecast(plan: Plan) -> None:
    """Print the cases and configs that `tune` would search on this machine, by variant, and about how long it takes."""
    from kerneltune.tune.run import expected_work, tasks_to_search

    family_ops = {sweep_case.op for sweep_case in plan.cases()}
    tasks, num_kept = tasks_to_search(plan, Progress())
    works = {task.key: expected_work(task, plan.options) for task in tasks}
    for (op, variant), keys in grouped(works, lambda key: (key.op, key.variant)).items():
        counts = f"{counted(len(keys), 'case')}, {sum(works[key].num_configs for key in keys)} configs"
        show_wrapped(f"{op} {variant}: {counts}{'' if op in family_ops else ' (the ceiling of bandwidth in records)'}")
    gpu, budget_s = device.current(), plan.options.search.budget_s
    limit = f", each at most {budget_s:g} s" if budget_s else ""
    remark = "no GPU here: cases that have a config are counted as well"
    if gpu.is_gpu:
        remark = f"{counted(num_kept, 'case')} with a config for {gpu.slug} not counted"
    seconds = sum(work.seconds for work in works.values())
    show_wrapped(f"about {seconds:.0f} s for {counted(len(tasks), 'case')}{limit} on a GPU like H200; {remark}")


def _show_outcome(tuned: "Sequence[TuningResult]") -> None:
    """Print how many cases were not tuned, which exits with 1, and in which programs calls find the configs."""
    status = Counter(result.status for result in tuned)
    num_searched, num_failed = status.total() - status["kept"], status["failed"]
    where = loading.where_configs_serve() if status["tuned"] else ""
    if where:
        note(where)
    if not num_searched:
        kept = f"{status['kept']} cases have configs (--force searches again)"
        show(f"nothing to tune: {kept if status['kept'] else 'no selected variant has knobs'}")
    if num_failed:
        error_line(f"{num_failed} of {counted(num_searched, 'case')} not tuned")
        raise typer.Exit(1)
