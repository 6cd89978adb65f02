"""`kerneltune sweep`: check, tune what the cache lacks, measure, record and tabulate a family."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import end_if_failed, note, show, show_wrapped, width
from kerneltune.cli.progress import reporter
from kerneltune.table import counted, pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kerneltune.records import Record
    from kerneltune.run_options import Selection


@o.selects()
def command(
    family: o.Family,
    wanted: "Selection",
    policy: o.PolicyName = "cold",
    tune: Annotated[bool, typer.Option("--tune/--no-tune", help="Tune what the config cache lacks.")] = True,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Measure what other packages offer as well.")] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="Ten headline cases with the configs at hand: check and tune nothing else.")
    ] = False,
    budget: o.Budget = None,
    trials: o.Trials = None,
    max_cases: o.MaxCases = None,
    check_only: Annotated[bool, typer.Option("--check-only", help="Check against the reference and stop there.")] = False,
    configs: o.Configs = None,
    results: o.Results = None,
    workers: o.Workers = None,
) -> None:
    """Check, tune what the cache lacks, measure all variants and peers, and keep the records.

    Without a GPU the check cases run in Triton's interpreter: correctness is checked there, without timing. On a GPU a first
    table of ten cases appears before anything is tuned and before peers that compile are measured; with --quick these cases are
    all, and nothing is tuned. A family may also be the folder of a capture, where configs and results then go.
    Exit code 1 if one of our own variants fails.
    """
    asked = family
    if folder := o.capture_of(family):
        o.use_capture(folder)
        configs, results = configs or Path(folder, "configs"), results or Path(folder, "results")
        family = str(Path(folder, "sweep.yaml"))
    results = o.results_root(results, family)
    o.require_writable(results)
    _start_server()
    known = o.load_ops()
    _require_writable(configs, results, check_only, tune and not quick)
    from kerneltune.campaign import run_quick, run_sweep
    from kerneltune.reporting.tables import check_table, sweep_table

    selection = o.make_selection(known, family, wanted, max_cases)
    options = o.make_options(
        policy, tune=tune and not quick, peers=peers, budget_s=budget, trials=trials, check_only=check_only,
        configs=configs, results=results, workers=workers,
    )  # fmt: skip
    with reporter() as progress:
        if quick:
            swept = run_quick(known, selection, options, progress, _show_first)
        else:
            swept = run_sweep(known, selection, options, progress, _show_first)
    timed = any(record.time_us is not None for record in swept.records)
    show((sweep_table(swept.records, brief=True) if timed else check_table(swept.records)).text(width()))
    if folder and not timed:
        _show_unchecked(family, selection, swept.records)
    if not timed and not check_only:
        _show_recorded(family, asked, results)
    for line in swept.remark.splitlines():
        show_wrapped(line)
    for path in swept.files:
        note(f"wrote {path}")
    end_if_failed(r for r in swept.records if not known[r.op].variant(r.variant).is_peer)


def _start_server() -> None:
    """Begin to start the measuring child where there may be a GPU: its imports take as long as those of this process."""
    from kerneltune import device
    from kerneltune.processes import start_server

    if device.may_have_gpu():
        start_server()


def _show_first(records: "Sequence[Record]") -> None:
    from kerneltune.reporting.tables import sweep_table

    show(sweep_table(records, brief=True).text(width()) + "\n")


_SHOWN = 5
"""Launches that are named."""


def _show_unchecked(family: str, selection: "Selection", checked: "Sequence[Record]") -> None:
    """Name the launches of a capture whose values were not checked."""
    from kerneltune.sweep import load

    launches = [entry.case for entry in load(Path(family), o.load_ops()).bench if selection.takes(entry)]
    done = {record.case for record in checked}
    left = [case for case in launches if case.name not in done]
    if left:
        named = [f"{case.name} ({pairs(dict(case.axes))})" for case in left[:_SHOWN]]
        more = [f"and {len(left) - _SHOWN} more"] if len(left) > _SHOWN else []
        show_wrapped(
            f"values not checked: {len(left)} of {counted(len(launches), 'launch', 'launches')}, too large for the interpreter: "
            f"{', '.join([*named, *more])}"
        )


def _show_recorded(family: str, asked: str, results: Path) -> None:
    """Show what recorded GPU times say of the family, and what a GPU would add to `kerneltune sweep ASKED`."""
    from kerneltune.records import load
    from kerneltune.reporting.tables import BEST_PEER, ab_rows, ab_table, side
    from kerneltune.sweep import family_name, recorded_root

    files = sorted(recorded_root(None, family).glob(f"*/{family_name(family)}.jsonl"))
    recorded = [r for path in files for r in load(path) if r.policy == "cold"]
    for name, others in (
        ("baseline", side([r for r in recorded if r.role != "peer"], "baseline")),
        ("the fastest peer of every case", side(recorded, BEST_PEER)),
    ):
        if rows := ab_rows(others, side(recorded, "optimized")):
            table = ab_table(rows, name, "optimized")
            show(f"\nRecorded: {name} (A) and optimized (B)")
            for line in (*table.head[1:], *table.foot[-1:]):
                show_wrapped(line)
    show_wrapped(
        f"On a GPU, `kerneltune sweep {asked}` also tunes what lacks a config, times all variants and peers, and writes "
        f"records and tables to {results}."
    )


def _require_writable(configs: Path | None, results: Path, check_only: bool, tune: bool) -> None:
    """Raise ValueError for a folder of this device that could not be written when the work is done."""
    from kerneltune import device

    here = device.current()
    o.require_writable(results / "runs" / here.slug)
    if here.is_gpu and not check_only:
        o.require_writable(results / here.slug)
        if tune:
            o.require_tunable(configs, results)
