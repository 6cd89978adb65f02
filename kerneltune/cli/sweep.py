"""`kerneltune sweep`: check, tune what the cache lacks, measure, record and tabulate a family."""

from pathlib import Path
from typing import Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import error_line, note, show, show_wrapped, width
from kerneltune.cli.progress import reporter


def command(
    family: o.Family,
    op: o.OpNames = None,
    case: o.CaseNames = None,
    dtype: o.Dtypes = None,
    quant: o.Quants = None,
    variant: o.VariantNames = None,
    policy: o.PolicyName = "cold",
    tune: Annotated[bool, typer.Option("--tune/--no-tune", help="Tune what the config cache lacks.")] = True,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Measure what other packages offer as well.")] = True,
    budget: o.Budget = None,
    trials: o.Trials = None,
    check_only: Annotated[bool, typer.Option("--check-only", help="Check against the reference and stop there.")] = False,
    configs: o.Configs = None,
    results: o.Results = None,
    workers: o.Workers = None,
) -> None:
    """Check, tune what the cache lacks, measure all variants and peers, and keep the records.

    Without a GPU the check cases run in Triton's interpreter: results are real there, times do not exist.
    Exit code 1 if one of our own variants fails.
    """
    results = o.results_root(results, family)
    o.require_writable(results)
    known = o.load_ops()
    _require_writable(configs, results, check_only, tune)
    from kerneltune.campaign import run_sweep
    from kerneltune.reporting.tables import sweep_table

    selection = o.make_selection(known, family, op, case, dtype, quant, variant)
    options = o.make_options(
        policy, tune=tune, peers=peers, budget_s=budget, trials=trials, check_only=check_only,
        configs=configs, results=results, workers=workers,
    )  # fmt: skip
    with reporter() as progress:
        swept = run_sweep(known, selection, options, progress)
    show(sweep_table(swept.records).text(width()))
    if swept.remark:
        show_wrapped(swept.remark)
    for path in swept.files:
        note(f"wrote {path}")
    failed = [r for r in swept.records if r.status == "failed" and not known[r.op].variant(r.variant).is_peer]
    for record in failed:
        error_line(f"failed: {record.variant} {record.case} {record.label}: {record.reason}")
    if failed:
        raise typer.Exit(1)


def _require_writable(configs: Path | None, results: Path, check_only: bool, tune: bool) -> None:
    """Raises ValueError for a folder of this device that could not be written when the work is done."""
    from kerneltune import device

    here = device.current()
    o.require_writable(results / "runs" / here.slug)
    if here.is_gpu and not check_only:
        o.require_writable(results / here.slug)
        if tune:
            o.require_tunable(configs, results)
