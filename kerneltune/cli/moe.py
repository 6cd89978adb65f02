"""`kerneltune moe`: training steps of expert layers, against bf16, torchao and their own bound, and where their time goes."""

from pathlib import Path
from typing import Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import deliver, width
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
    memory: Annotated[
        str | None, typer.Option("--memory", metavar="CASE", help="Measure the memory of this case's step instead, on a GPU.")
    ] = None,
    output: o.Output = None,
    results: o.Results = None,
) -> None:
    """Show what `kerneltune sweep moe_training` recorded: step, bound, speed-ups, and the parts of every step."""
    o.choice("format", style, ("text", "markdown"))
    if memory is not None:
        deliver(_memory(memory), output)
        return
    from kerneltune.records import load
    from kerneltune.workloads.moe_table import step_markdown, step_rows, step_text

    rows = step_rows([r for path in source or record_files(results, FAMILY) for r in load(path)], microbatches)
    if not rows:
        raise ValueError(f"no records of training steps: run `kerneltune sweep {FAMILY}` on a GPU")
    deliver(step_markdown(rows, microbatches) if style == "markdown" else step_text(rows, microbatches, width()), output)


def _memory(name: str) -> str:
    """The memory of a case by its name, under balanced groups.

    Raises:
        ValueError: no such case, or no GPU.
    """
    known = o.load_ops()
    from kerneltune import sweep
    from kerneltune.plan import require_gpu
    from kerneltune.workloads.moe_memory import memory_text, step_memory

    entries = sweep.load(sweep.find(FAMILY), known).bench
    cases = {entry.case.name: entry.case for entry in entries if entry.case.option("groups") == "balanced"}
    o.choice("memory", name, cases)
    require_gpu("moe --memory")
    return memory_text(step_memory(cases[name]))
