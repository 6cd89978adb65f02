"""`kerneltune weights`: int4 weights against 8 and 16 bits, token by token, and where the others catch up."""

from pathlib import Path
from typing import Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import deliver, width
from kerneltune.cli.files import record_files

FAMILY = "weight_only"


def command(
    source: Annotated[
        list[Path] | None, typer.Option("--from", metavar="FILE", help="Take records from this file; may be repeated.")
    ] = None,
    policy: o.PolicyName = "cold",
    style: Annotated[str, typer.Option("--format", metavar="text|markdown", help="Form of the table.")] = "text",
    output: o.Output = None,
    results: o.Results = None,
) -> None:
    """Show what `kerneltune sweep weight_only` recorded: share of the ceiling, and from how many tokens fp8 or fp16 is faster."""
    o.choice("format", style, ("text", "markdown"))
    o.choice("policy", policy, o.POLICIES)
    from kerneltune.records import load
    from kerneltune.workloads.weight_table import weight_markdown, weight_rows, weight_text

    rows = weight_rows([r for path in source or record_files(results, FAMILY) for r in load(path)], policy)
    if not rows:
        raise ValueError(f"no records of int4 products: run `kerneltune sweep {FAMILY}` on a GPU")
    deliver(weight_markdown(rows) if style == "markdown" else weight_text(rows, width()), output)
