"""`kerneltune capture`: run a program unchanged and record the launches of its autotuned kernels."""

import json
from pathlib import Path
from typing import Annotated

import typer

from kerneltune import device
from kerneltune.cli import options as o
from kerneltune.cli.console import error_line, note

Program = Annotated[list[str], typer.Argument(metavar="-- PROGRAM …", help="The program and its arguments, behind --.")]


def command(
    program: Program,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Folder of the capture; added to if it is there.")],
    kernel: Annotated[
        str, typer.Option("--kernel", metavar="GLOB", help="Only kernels of such a name; the others tune themselves as usual.")
    ] = "*",
    max_bytes: Annotated[
        int,
        o.count("--max-bytes", "Most bytes of values that each process may keep.", 0),
    ] = 256 << 20,
    autotune: Annotated[
        bool, typer.Option("--autotune", help="Let the authors' tuning run, and record its choice; slower.")
    ] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Turn torch.compile off, so that compiled kernels are seen.")] = False,
) -> None:
    """Run a program unchanged and record each class of launches of its autotuned kernels.

    Subprocesses are recorded as well. The kernels run with their authors' first configs, so nothing is timed, or as the authors
    tune them under --autotune. The capture holds shapes, strides, configs, grids, the values of integer and boolean tensors, and
    samples of other tensors of at most 1 MiB. The program's exit code is that of this command; its output is untouched, and
    what this command has to say goes to standard error.
    """
    from kerneltune.adopt.folder import CLASSES
    from kerneltune.adopt.launcher import require_program, run_program
    from kerneltune.adopt.operators import write_sweep
    from kerneltune.adopt.startup import CAPTURE, CAPTURE_OPTIONS
    from kerneltune.cli.adopt import show_capture

    require_program(program)
    o.make_folder(out)
    options = {"pattern": kernel, "max_bytes": max_bytes, "autotune": autotune}
    environment = {CAPTURE: str(out.resolve()), CAPTURE_OPTIONS: json.dumps(options)}
    if device.model() == device.INTERPRETER:
        environment["TRITON_INTERPRET"] = "1"
    if eager:
        environment["TORCHDYNAMO_DISABLE"] = "1"
    code = run_program(program, environment)
    if not (out / CLASSES).is_dir():  # the program's exit code counts
        error_line(f"nothing was captured: {_reason(out, code)}")
        raise typer.Exit(code)
    try:
        show_capture(out, to_messages=True)
        note(f"wrote {write_sweep(out)}: `kerneltune sweep {out}` checks these launches, on a GPU it tunes and times them")
    except ValueError as error:
        error_line(f"nothing was captured: {error}")
    raise typer.Exit(code)


def _reason(out: Path, code: int) -> str:
    """Return why a program that ended with an exit code left no launch in a folder."""
    from kerneltune.adopt.folder import read_counts

    for process in read_counts(out, [])[1]:
        for kernel, reason in process.get("refused", {}).items():
            return f"{kernel}: {reason}"
    ended = f"the program ended with {code} before it launched a" if code else "the program launched no"
    return f"{ended} kernel of triton.autotune or kerneltune.autotune"
