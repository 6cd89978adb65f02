"""`kerneltune gate`: compare new records, or a fresh run, with a baseline; the exit code is the answer."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kerneltune.cache import path_of
from kerneltune.cli import inspect, loading
from kerneltune.cli import options as o
from kerneltune.cli.console import STDOUT, end_if_failed, error_line, messages, show, width, write
from kerneltune.cli.files import SUFFIX, load_baseline, load_some, selected
from kerneltune.cli.progress import Reporter
from kerneltune.device import require_gpu, slug
from kerneltune.files import append_lines
from kerneltune.plan import Plan, Selection
from kerneltune.records import Record, load_if_present, merge
from kerneltune.sweep_file import gate_margin

if TYPE_CHECKING:
    from kerneltune.gating.verdict import Verdict

_HELD_AGAINST = (
    "Records to hold against: a .jsonl file, or REV or REV:PATH of git; with --static REV or a file of inspect --save."
)
Baseline = Annotated[str, typer.Argument(help=_HELD_AGAINST)]
New = Annotated[Path | None, typer.Argument(help="Records to judge, a .jsonl file; or measure them with --run.")]
_PROCESSES = 3
ANNOTATED = "annotated"
"""Key in the meta of a command's context: whether errors have an annotation, too."""


@dataclass(frozen=True)
class Measuring:
    """Hold the options of `--run`."""

    policy: Annotated[str | None, o.pick("--policy", o.POLICIES, "With --run: timing policy; else the operator's.")] = None
    processes: Annotated[int | None, o.count("--processes", f"With --run: processes to measure in, else {_PROCESSES}.")] = None
    update: Annotated[bool, o.flag("--update", "With --run: put the rows measured into BASELINE, judge nothing.")] = False
    save: Annotated[Path | None, o.option("--save", "FILE", "With --run: keep the rows measured.")] = None


@dataclass(frozen=True)
class Forms:
    """Hold the forms of the answer beside the text."""

    junit: Annotated[Path | None, o.option("--junit", "FILE", "Write JUnit XML.")] = None
    markdown: Annotated[Path | None, o.option("--markdown", "FILE", "Write a Markdown summary; - prints it.")] = None
    annotations: Annotated[
        bool, o.flag("--annotations", "Print GitHub annotations; append Markdown to $GITHUB_STEP_SUMMARY if set.")
    ] = False


@o.ungrouped()
def command(
    context: typer.Context,
    baseline: Baseline,
    new: New = None,
    *,
    selection: Selection,
    run: Annotated[str | None, o.option("--run", "FAMILY", "Measure this family now, on this GPU.")] = None,
    allow_stale: Annotated[bool, o.flag("--allow-stale", "Pass records of other code or configs than this checkout's.")] = False,
    peers: Annotated[bool, o.flag("--peers/--no-peers", "Judge peers as well; with --run: measure them.")] = False,
    measuring: Measuring,
    margin: Annotated[float | None, o.option("--margin", "FRACTION", "Tolerated slowdown; the sweep file's, else 0.03.")] = None,
    forms: Forms,
    static: Annotated[bool, o.flag("--static", "Compile the cached configs instead of timing them, on any machine.")] = False,
    target: Annotated[
        list[str] | None, o.option("--target", "ARCH|all", "With --static: compile for it alone; may be repeated.")
    ] = None,
    accept: o.Accept = None,
    workers: o.Workers = None,
    configs: o.Configs = None,
    results: o.Results = None,
) -> None:
    """Say whether the new records are slower than the baseline.

    Exit code 0: no. 1: a regression, a failed or a missing row, or records of other code or configs than this checkout's. 2:
    nothing compared, or not comparable. 3: ambiguous, measure more. A run measures suspects again by itself, up to twice. A
    first baseline: gate FILE --run FAMILY --update.

    With --static 1 means new spills, narrower accesses of memory, or over a limit of the target, in a line without the text of
    an --accept.
    """
    context.meta[ANNOTATED] = forms.annotations
    o.read_configs(configs)
    if static:
        refused = {"new": new, "run": run, "allow_stale": allow_stale, "peers": peers, "margin": margin}
        o.refuse("expected without --static", **refused, **o.given(measuring))
        if len(selection.ops) > 1:
            raise ValueError(f"op: {selection.ops[1]!r}: expected one operator, or all, with --static")
        return _report(inspect.judge(baseline, selection, target, workers, accept or ()), forms)
    o.refuse("expected only with --static", target=target, accept=accept, workers=workers)
    if (new is None) == (run is None):
        raise ValueError(f"new: {repr(str(new)) if new else 'missing'}: expected a .jsonl file or --run, one of them")
    if margin is not None and not 0 <= margin < 1:
        raise ValueError(f"margin: {margin}: expected a fraction from 0 to below 1, such as 0.03")
    if new is not None:
        o.refuse("expected only with --run", **o.given(measuring))
        return _report(_judged_file(baseline, new, selection, margin, peers, allow_stale), forms)
    o.refuse("expected only with a file of records", allow_stale=allow_stale)
    for path in filter(None, (forms.junit, forms.markdown)):
        loading.require_writable(path.parent)
    plan = loading.make_plan(run or "", selection, results=results, policy=measuring.policy, peers=peers)
    processes = measuring.processes or _PROCESSES
    if measuring.update:
        return _update(baseline, plan, processes)
    _report(_measured(baseline, plan, processes, margin, measuring.save), forms)


def _judged_file(
    baseline: str, new: Path, selection: Selection, margin: float | None, peers: bool, allow_stale: bool
) -> "Verdict":
    """Compare the selected rows of the new file with the baseline, and their code and configs with the checkout's."""
    from kerneltune.gating.rows import defaults_of
    from kerneltune.gating.verdict import DEFAULT_MARGIN, gate

    records = load_some(new)  # first, because git would blame the baseline if the new file is missing
    against = load_baseline(baseline, new)
    selected([*against, *records], selection)  # a name that neither side has is an error
    records, against = ([record for record in side if selection.matches(record.key)] for side in (records, against))
    families = {record.family or new.stem for record in records}
    if margin is None and len(families) == 1:
        margin = gate_margin(families.pop())
    tolerated = DEFAULT_MARGIN if margin is None else margin
    stale = []
    if not allow_stale:
        from kerneltune.stale import stale_lines  # imports torch

        _require_usable_configs(records)
        try:
            stale = [f"{line}, or --allow-stale" for line in stale_lines(records, loading.load_ops())]
        except ValueError as error:
            raise ValueError(f"{new}: {error}") from error
    return gate(
        against, records, tolerated, peers=peers, defaults=lambda op: defaults_of(loading.load_summaries(), op), stale=stale
    )


def _require_usable_configs(records: Iterable[Record]) -> None:
    """Raise ValueError for a config file of the records' operators and GPUs that has an entry which calls do not use."""
    from kerneltune.cli.cache import checked_entries

    ops = loading.load_ops()
    for op, gpu in dict.fromkeys((record.op, slug(record.device)) for record in records if record.role != "peer"):
        if op in ops:
            checked_entries(path_of(op, gpu))


def _measured(baseline: str, plan: Plan, processes: int, margin: float | None, save: Path | None) -> "Verdict":
    """Compare a fresh run with the baseline."""
    from kerneltune.gating.run import run_gate

    require_gpu("gate --run")
    against = load_baseline(baseline, plan.options.records_folder / f"{plan.family}.jsonl")
    _require_usable_configs(against)
    if save is not None:
        _require_mergeable(save)
    with Reporter() as progress:
        verdict, measured = run_gate(partial(loading.load_ops, o.captured()), plan, against, processes, margin, progress)
    if save is not None and measured:
        _keep(save, measured)
    return verdict


def _update(baseline: str, plan: Plan, processes: int) -> None:
    """Put a fresh run into the baseline, unless a row failed its check."""
    from kerneltune.gating.rows import pool
    from kerneltune.gating.run import run_processes

    if not baseline.endswith(SUFFIX) or (":" in baseline and not Path(baseline).exists()):
        raise ValueError(f"baseline: {baseline!r}: expected a {SUFFIX} file where --update is given")
    _require_mergeable(Path(baseline))
    with Reporter() as progress:
        measured = pool(run_processes(partial(loading.load_ops, o.captured()), plan, processes, progress))
    end_if_failed(measured)
    if not any(record.status == "passed" for record in measured):
        raise ValueError(f"nothing measured: {plan.selection.family} has no such case and variant that can be timed here")
    _keep(Path(baseline), measured)


def _require_mergeable(path: Path) -> None:
    """Raise ValueError for a file that could not take the measured rows, before they are measured."""
    loading.require_writable(path.parent)
    load_if_present(path)


def _keep(path: Path, measured: list[Record]) -> None:
    merge(path, measured)
    show(f"wrote {path}", messages)


def _report(verdict: "Verdict", forms: Forms) -> None:
    """Write and print the answer in every requested form; exit with its code, or with 2 where a pass cannot be written."""
    from kerneltune.gating.report import error_annotation, gate_annotations, gate_junit, gate_markdown, gate_text

    is_printed = forms.markdown == STDOUT
    renders = ((forms.junit, gate_junit), (None if is_printed else forms.markdown, gate_markdown))
    writers: list[Callable[[], None]] = [partial(write, path, render(verdict)) for path, render in renders if path is not None]
    if forms.annotations and os.environ.get("GITHUB_STEP_SUMMARY"):
        summary = (gate_markdown(verdict) + "\n").encode()
        writers.append(partial(append_lines, Path(os.environ["GITHUB_STEP_SUMMARY"]), summary, keep_partial=True))
    code = verdict.exit_code
    for writer in writers:
        try:
            writer()
        except ValueError as error:
            if forms.annotations:
                show(error_annotation(str(error)))
            error_line(f"error: {error}")
            code = code or 2
    if code == verdict.exit_code:  # a file that cannot be written is no pass
        show(gate_markdown(verdict) if is_printed else gate_text(verdict, width()))
        if forms.annotations:
            show(gate_annotations(verdict))
    raise typer.Exit(code)
