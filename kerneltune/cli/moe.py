"""`kerneltune moe`: training steps of expert layers, against bf16, torchao and their own bound, and where their time goes."""

from pathlib import Path
from typing import Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import deliver
from kerneltune.cli.files import record_files

FAMILY = "moe_training"


def command(
    source: Annotated[
        list[Path] | None, typer.Option("--from", metavar="FILE", help="Take records from this file; may be repeated.")
    ] = None,
    microbatches: Annotated[
        int, typer.Option("--microbatches", metavar="N", min=1, help="Steps that share one cast of the weights.")
    ] = 8,
    style: Annotated[str, typer.Option("--format", metavar="text|markdown", help="Form of the table.")] = "text",
    output: o.Output = None,
    results: o.Results = None,
) -> None:
    """Show what `kerneltune sweep moe_training` recorded: step, bound, speed-ups, and the parts of every step."""
    o.choice("format", style, ("text", "markdown"))
    from kerneltune.records import load
    from kerneltune.workloads.moe_table import step_markdown, step_rows, step_text

    rows = step_rows([r for path in source or record_files(results, FAMILY) for r in load(path)], microbatches)
    if not rows:
        raise ValueError(f"no records of training steps: run `kerneltune sweep {FAMILY}` on a GPU")
    deliver(step_markdown(rows) if style == "markdown" else step_text(rows, microbatches), output)
