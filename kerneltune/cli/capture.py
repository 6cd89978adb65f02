"""`kerneltune capture`: run a program unchanged and record the launches of its autotuned kernels."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from kerneltune import device
from kerneltune.cli import options as o
from kerneltune.cli.console import error_line, note
from kerneltune.table import counted

_BAD_INPUT = 2
_SHOWN = 5
"""Kernels that are named."""

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
    samples of other tensors of at most 1 MiB. The program's exit code is that of this command, or 2 where a decorator names what
    its kernel does not have. The program's output is untouched; what this command has to say goes to standard error.
    """
    from kerneltune.adopt.folder import CLASSES, processes, read_notes, remove_stale
    from kerneltune.adopt.launcher import require_program, run_program
    from kerneltune.adopt.operators import write_sweep
    from kerneltune.adopt.startup import CAPTURE, CAPTURE_OPTIONS
    from kerneltune.cli.adopt import show_capture

    if autotune and device.model() == device.INTERPRETER:
        raise ValueError("autotune: expected a GPU: in the interpreter nothing can be timed")
    require_program(program)
    o.make_folder(out)
    options = {"pattern": kernel, "max_bytes": max_bytes, "autotune": autotune}
    environment = {CAPTURE: str(out.resolve()), CAPTURE_OPTIONS: json.dumps(options)}
    if device.model() == device.INTERPRETER:
        environment["TRITON_INTERPRET"] = "1"
    if eager:
        environment["TORCHDYNAMO_DISABLE"] = "1"
    earlier = processes(out)
    code = run_program(program, environment)
    said = read_notes([path for path in processes(out) if path not in earlier], [])
    refused = {kernel: reason for one in said for kernel, reason in one.refused.items()}
    misnamed = [kernel for one in said for kernel in one.misnamed]
    if misnamed:
        error_line(f"error: {misnamed[0]}: {refused[misnamed[0]]}")
        code = _BAD_INPUT
    if not (out / CLASSES).is_dir():
        if not misnamed:
            plain = [kernel for one in said for kernel in one.plain]
            named = ", ".join(plain[:_SHOWN]) + (", …" if len(plain) > _SHOWN else "")
            more = f"; plain @triton.jit, not tunable: {named}" if plain else ""
            error_line(f"nothing was captured: {_reason(refused, code)}{more}")
        raise typer.Exit(code)
    try:
        if stale := remove_stale(out, {digest for one in said for digest in one.launches}):
            note(f"removed {counted(len(stale), 'class', 'classes')} of kernels whose source has changed since")
        show_capture(out, to_messages=True)
        note(f"wrote {write_sweep(out)}: `kerneltune sweep {out}` checks these launches, on a GPU it tunes and times them")
    except ValueError as error:
        error_line(f"nothing was captured: {error}")
    raise typer.Exit(code)


def _reason(refused: Mapping[str, str], code: int) -> str:
    """Return why a program that ended with an exit code left no launch.

    refused: the kernels that were launched but not captured, with the reasons.
    """
    for kernel, reason in refused.items():
        return f"{kernel}: {reason}"
    ended = f"the program ended with {code} before it launched a" if code else "the program launched no"
    return f"{ended} kernel of triton.autotune or kerneltune.autotune"
