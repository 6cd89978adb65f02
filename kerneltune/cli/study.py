"""`kerneltune study`: how often the gate cries wolf, and which slowdowns it catches, on this GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import note, show_table, write
from kerneltune.cli.progress import reporter

if TYPE_CHECKING:
    from kerneltune.gating.study import Process
    from kerneltune.plan import Options, Selection


def command(
    family: Annotated[str | None, typer.Argument(help="A file of sweeps/ by name, or a path ending in .yaml.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="DIR", help="Decide on what --save kept; needs no GPU.")
    ] = None,
    op: o.OpNames = None,
    case: o.CaseNames = None,
    dtype: o.Dtypes = None,
    quant: o.Quants = None,
    variant: o.VariantNames = None,
    policy: o.PolicyName = "cold",
    processes: Annotated[int, typer.Option("--processes", metavar="N", help="Fresh processes to measure in.")] = 12,
    per_side: Annotated[int, typer.Option("--per-side", metavar="N", help="Processes of a gate run.")] = 3,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", help="Decisions per row.")] = 20,
    margin: Annotated[float, typer.Option("--margin", metavar="FRACTION", help="Slowdown that is tolerated.")] = 0.03,
    delay: Annotated[
        list[float] | None,
        typer.Option("--delay", metavar="FRACTION", help="Slowdown to plant; may be repeated. 0.02, 0.05, 0.1 if not given."),
    ] = None,
    save: Annotated[Path | None, typer.Option("--save", metavar="DIR", help="Keep what was measured.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the table as Markdown.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the counts as CSV.")] = None,
    configs: o.Configs = None,
) -> None:
    """Measure variants against themselves and against themselves with planted delays, and let the gate judge.

    Nothing planted: every regression is a false alarm. Planted, in one row of ten: `short` rows become no more than 0.5 µs
    slower, which the gate lets pass by its rule; `caught` is the part of the others called a regression.
    """
    if (family is None) == (source is None):
        raise ValueError(f"family: {family!r}: expected a family or --from, one of them")
    o.number("repeats", repeats, 1)
    o.number("per-side", per_side, 1)
    if source is None:
        o.number("processes", processes, 3 * per_side)
    for fraction in delay or ():
        o.number("delay", fraction, 0.001)
    if save is not None:
        o.require_writable(save)
    if source is None:
        from kerneltune import sweep

        sweep.find(str(family))
        selection = o.make_selection(o.load_ops(), str(family), op, case, dtype, quant, variant)
        measured = _measured(selection, o.make_options(policy, peers=False, configs=configs), processes, delay)
    else:
        from kerneltune.gating.study import saved

        measured = saved(source)
    from kerneltune.gating import study

    if save is not None:
        study.save(save, measured)
        note(f"wrote {save}")
    rows = study.decide(measured, per_side=per_side, repeats=repeats, margin=margin)
    show_table(study.STUDY_HEAD, study.study_cells(rows))
    for path, render in ((markdown, study.study_markdown), (csv, study.study_csv)):
        if path is not None:
            write(path, render(rows))


def _measured(selection: "Selection", options: "Options", processes: int, delays: list[float] | None) -> "list[Process]":
    """What the processes of this GPU measured."""
    from kerneltune.gating import study

    with reporter() as progress:
        return study.measure(o.load_ops, selection, options, processes, sorted(set(delays or study.DELAYS)), progress)
