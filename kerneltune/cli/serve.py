"""`kerneltune serve`: run a program with the tuned configs of a capture."""

from pathlib import Path
from typing import Annotated

import typer

from kerneltune.adopt import startup
from kerneltune.cli import options as o
from kerneltune.cli.capture import Program


def command(
    program: Program,
    configs: Annotated[
        Path, typer.Option("--configs", metavar="DIR", envvar="KERNELTUNE_ADOPT", help="Folder that `tune` has written.")
    ],
    miss: Annotated[str, o.pick("--miss", startup.POLICIES, "What launches that were not tuned run with.")] = "author",
    manifest: Annotated[
        str, typer.Option("--manifest", metavar="SHA256", help="Refuse any other table; the digest's beginning is enough.")
    ] = "",
    portfolio: Annotated[
        int,
        o.count("--portfolio", "Configs that torch.compile may choose from, by timing if more than 1."),
    ] = 1,
) -> None:
    """Run a program with the tuned configs of a capture; nothing is timed at run time.

    Subprocesses are served as well. Launches that were not tuned are recorded in DIR/misses, a capture that `tune` takes. The
    program's exit code is that of this command; its output is untouched.
    """
    from kerneltune.adopt.launcher import run_program

    if not (configs / "served").is_dir():
        raise ValueError(f"{configs}: no tuned configs: run `kerneltune tune {configs}` first")
    environment = {startup.ADOPT: str(configs.resolve()), startup.MISS: miss, startup.PORTFOLIO: str(portfolio)}
    if manifest:
        environment[startup.MANIFEST] = manifest
    raise typer.Exit(run_program(program, environment))
