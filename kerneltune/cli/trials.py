"""`kerneltune trials`: analyse the trials of a family by knob and by case."""

import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from kerneltune import device
from kerneltune.cli import loading
from kerneltune.cli import options as o
from kerneltune.cli.console import show, show_wrapped, width
from kerneltune.plan import Plan, Selection
from kerneltune.rounding import cdiv
from kerneltune.search.loop import times_of
from kerneltune.spec import Case
from kerneltune.table import Column, Row, Table
from kerneltune.task import Evaluation, gpus_with_trials, trials_file, trials_folder
from kerneltune.wording import assignments, counted, first_of

Searches = list[tuple[Case, dict[Any, Evaluation]]]
"""Cases with the stored evaluations of their configs."""
_DEAD = 4
"""Most values of knobs that a short answer names."""
_WEIGHED = 8
"""Largest number of cases whose important knobs are computed."""


@o.ungrouped(without=("variant",))
def command(
    family: o.Family,
    selection: Selection,
    variant: o.VariantName = "optimized",
    policy: o.PolicyName = None,
    gpu: o.Gpu = None,
    results: Annotated[Path | None, o.option("--results", "DIR", "Folder of the records; a capture has its own.")] = None,
) -> None:
    """Show what past trials say: how good each search was, the knobs that matter, and the fewest configs for all cases.

    A family may also be the folder of a capture.
    """
    file = family
    if capture := loading.capture_folder(family):
        o.use_capture(capture)
        file, results = str(Path(capture, "sweep.yaml")), results or Path(capture, "results")
    plan = loading.make_plan(file, replace(selection, variants=(variant,)), policy=policy, results=results)
    gpu = gpu or device.current().slug
    searches_by_title = searches_of(plan, gpu)
    if not searches_by_title:
        folder = trials_folder(plan.options.results, gpu)
        ops = {sweep_case.op for sweep_case in plan.cases()}
        gpus = set[str]().union(*(gpus_with_trials(plan.options.results, op) for op in ops)) - {gpu}
        how = f"read those of {' or '.join(f'--gpu {name}' for name in sorted(gpus))}, or " if gpus else ""
        asked = capture or family
        show_wrapped(f"no trials of {asked} in {folder}: {how}`kerneltune tune {asked}` makes them, on a GPU")
        return
    for title, searches in searches_by_title.items():
        show_searches(title, searches, whole=True)
        show("")


def searches_of(plan: Plan, gpu: str) -> dict[str, Searches]:
    """Return title -> the stored trials of a variant on the selected bench cases, under their newest fingerprint.

    gpu: folder name of the GPU model.
    """
    from kerneltune.search.trials import newest_trials

    searches_by_title: dict[str, Searches] = {}
    ops = {sweep_case.op for sweep_case in plan.cases()}
    trials = {op: newest_trials(trials_file(plan.options.results, gpu, op)) for op in ops}
    for sweep_case in plan.cases():
        op, case = plan.ops[sweep_case.op], sweep_case.case
        for variant in op.variants:
            if not plan.selection.matches_variant(variant.name):
                continue
            stored = trials[op.name].get(plan.case_key(sweep_case)._replace(variant=variant.name), {})
            if any(evaluation.time_us is not None for evaluation in stored.values()):
                searches_by_title.setdefault(f"{op.name} {variant.name} {case.quant}", []).append((case, stored))
    return searches_by_title


def show_searches(title: str, searches: Searches, whole: bool = False) -> None:
    """Summarize the trials in a few lines; whole: with a row per case, all values that never win, and the fewest configs."""
    from kerneltune.search import insight

    cases = [times_of(stored) for _, stored in searches]
    near = [insight.num_to_near(stored.values()) for _, stored in searches]
    status = Counter(evaluation.status for _, stored in searches for evaluation in stored.values())
    counts = ", ".join(f"{count} {name}" for name, count in status.most_common())
    show_wrapped(f"{title}: {counted(len(cases), 'case')}, {counted(status.total(), 'trial')} ({counts})")
    ties = statistics.median(len(insight.ties(times)) for times in cases)
    evaluations = statistics.median(len(stored) for _, stored in searches)
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
    dead = [f"{name}={value} (-{100 * fraction:.0f} % configs)" for name, value, fraction in insight.dead_values(cases)]
    if dead:
        show_wrapped(f"  never within 2 %: {first_of(dead, len(dead) if whole else _DEAD)}")
    cover = insight.set_cover(cases)
    keep, how = "keeps" if len(cover.configs) == 1 else "keep", "" if cover.is_exact else ", perhaps not the fewest"
    good = f"every case ({len(cases)}) within 2 % of its best (worst {100 * cover.worst_gap:.1f} %{how})"
    show_wrapped(f"  {counted(len(cover.configs), 'config')} {keep} {good}")
    if whole:
        for knobs in cover.configs:
            show_wrapped("    " + assignments(dict(knobs)), " " * 6)
        show(_cases_table(searches).text(width()))


def _cases_table(searches: Searches) -> Table:
    """Return a row per case: its best time, how good its search was, and the knobs that matter."""
    from kerneltune.search import insight

    numbers = (Column("best µs", digits=2), *(Column(name, digits=0) for name in ("trials", "to 2 %", "ties")))
    columns = (Column("case", wraps=True), *numbers, Column("knobs that matter", wraps=True))
    rows = []
    for case, stored in searches:
        times = times_of(stored)
        matter = list(insight.importances(times).items())[:2]
        top = " ".join(f"{knob} {100 * share:.0f}%" for knob, share in matter)
        to_near = insight.num_to_near(stored.values())
        counts = (min(times.values()), len(stored), to_near, len(insight.ties(times)))
        rows.append(Row((f"{case.name} {case.dtype}", *counts, top)))
    return Table(columns, tuple(rows))
