"""`kerneltune gate`: new records against a baseline; the exit code is the answer."""

from pathlib import Path
from typing import Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import deliver


def command(
    baseline: Annotated[Path, typer.Argument(help="Records to hold against, a .jsonl file.")],
    new: Annotated[Path, typer.Argument(help="Records to judge, a .jsonl file.")],
    margin: Annotated[float, typer.Option("--margin", metavar="FRACTION", help="Slowdown that is tolerated, a fraction.")] = 0.03,
    style: Annotated[str, typer.Option("--format", metavar="text|markdown", help="How to show the rows.")] = "text",
    output: o.Output = None,
) -> None:
    """Say whether the new records are slower than the baseline.

    Exit code 0: no. 1: a regression, a failed or a missing row. 2: not comparable. 3: ambiguous, measure more.
    """
    from kerneltune.gate import gate, gate_markdown, gate_text
    from kerneltune.records import load

    o.choice("format", style, ("text", "markdown"))
    verdict = gate(load(baseline), load(new), margin)
    deliver(gate_markdown(verdict) if style == "markdown" else gate_text(verdict), output)
    raise typer.Exit(verdict.exit_code)
