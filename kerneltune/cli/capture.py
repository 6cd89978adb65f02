"""`kerneltune capture`: run a program unchanged and record the launches of its autotuned kernels."""

import fnmatch
import json
import os
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kerneltune import device
from kerneltune.adopt.startup import CAPTURE, CAPTURE_OPTIONS, STARTED
from kerneltune.cli import loading
from kerneltune.cli import options as o
from kerneltune.cli.console import error_line, messages, note
from kerneltune.errors import meant
from kerneltune.wording import counted, first_of

if TYPE_CHECKING:
    from kerneltune.adopt.folder import ProcessNotes

NOT_FOUND = "no Python of the program found kerneltune: python -I, sudo or a container drops PYTHONPATH: install kerneltune there"
_BAD_INPUT = 2
_ALL = "*"
_ALSO_PLAIN = ", plain @triton.jit under --eager --plain"
_SHOWN = 5
"""Kernels that are named."""
_SIGNALS = 128
"""Exit codes above it say that a signal ended a program, such as that of an access outside of its memory."""

Program = Annotated[list[str], o.argument("-- PROGRAM …", "The program and its arguments, behind --.")]


def command(
    program: Program,
    out: Annotated[
        Path, o.option("--out -o", "DIR", "Folder of the capture; an existing capture is extended.", parser=o.named_folder)
    ],
    kernel: Annotated[
        list[str] | None, o.option("--kernel", "GLOB", "Only kernels whose name matches; other kernels tune themselves as usual.")
    ] = None,
    max_bytes: Annotated[int, o.count("--max-bytes", "Most bytes of values that each process may keep.", 0)] = 256 << 20,
    ignore_arg: Annotated[
        list[str] | None, o.option("--ignore-arg", "NAME", "Argument whose values make no classes: a seed. May be repeated.")
    ] = None,
    autotune: Annotated[bool, o.flag("--autotune", "Let the authors' tuning run, and record its choice; slower.")] = False,
    plain: Annotated[bool, o.flag("--plain", "Also kernels without an autotuner; tune searches their warps and stages.")] = False,
    eager: Annotated[bool, o.flag("--eager", "Turn torch.compile off, so that compiled kernels are seen.")] = False,
) -> None:
    """Run a program unchanged and record each class of launches of its autotuned kernels.

    Subprocesses are recorded as well. The kernels run with their authors' first configs, so nothing is timed, or as the authors
    tune them under --autotune. The capture holds shapes, strides, configs, grids, the values of integer and boolean tensors, and
    samples of other tensors of at most 1 MiB. The exit code is the program's, or 2 if a decorator names an argument that
    its kernel lacks, or 1 if a program that ended with 0 left nothing to capture. Where torchrun, srun or mpirun has started this
    command once for each rank, a rank without kernels ends with 0. The program's output is untouched; messages of this command
    go to standard error.
    """
    from kerneltune.adopt.folder import CLASSES, process_files, read_notes, remove_parts
    from kerneltune.adopt.program import run_program

    if autotune and device.model() == device.INTERPRETER:
        raise ValueError("autotune: expected a GPU: in the interpreter nothing can be timed")
    if kernel and len(kernel) > 1:
        raise ValueError(f"kernel: {kernel[1]!r}: expected --kernel once, like 'attn_*'")
    pattern = kernel[0] if kernel else _ALL
    loading.require_writable(out)
    options = {"pattern": pattern, "max_bytes": max_bytes, "autotune": autotune, "ignored": ignore_arg or [], "plain": plain}
    environment = {CAPTURE: str(out.resolve()), CAPTURE_OPTIONS: json.dumps(options)}
    environment |= {"TRITON_INTERPRET": "1"} if device.model() == device.INTERPRETER else {}
    environment |= {"TORCHDYNAMO_DISABLE": "1"} if eager else {}
    remove_parts(out)
    earlier, has_classes = process_files(out), (out / CLASSES).is_dir()
    with tempfile.TemporaryDirectory(prefix="kerneltune-") as folder:
        code = run_program(program, environment | {STARTED: str(Path(folder, "started"))})
        is_found = Path(folder, "started").exists()
    written = [path for path in process_files(out) if path not in earlier]
    notes, _ = read_notes(written)
    is_captured = bool(notes.launches) and _finish(out, notes.launches.keys(), ignore_arg or ())
    if notes.misnamed:
        error_line(f"error: {notes.misnamed[0]}: {notes.refused[notes.misnamed[0]]}")
        code = _BAD_INPUT
    elif not notes.launches:
        kept = f"; {out} keeps its earlier launches" if has_classes else ""
        reason = _reason(notes, pattern, code, plain) if is_found or written or code else NOT_FOUND
        error_line(f"nothing was captured: {reason}{_unseen(notes, plain, eager)}{kept}")
    # Because a launcher ends the job where a rank ends with an error, one of several ranks may capture nothing.
    is_rank = any(os.environ.get(name, "").isdecimal() and int(os.environ[name]) > 1 for name in _NUM_RANKS)
    raise typer.Exit(code or int(not is_captured and not is_rank))


_NUM_RANKS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables in which torchrun, srun, Open MPI and MPICH give each process the number of processes."""


def _finish(out: Path, launched: Collection[str], ignored: Sequence[str]) -> bool:
    """Remove stale classes from a capture, show it and write its sweep file; return whether it holds a launch that can be tuned.

    launched: digests of the classes that were launched just now; ignored: names that --ignore-arg gives.
    """
    from kerneltune.adopt.folder import remove_stale
    from kerneltune.adopt.operators import write_capture_sweep
    from kerneltune.adopt.overview import read_capture
    from kerneltune.cli.captures import show_capture

    try:
        stale = remove_stale(out, launched)
        if stale:
            note(f"removed {counted(len(stale), 'class', 'classes')} of kernels whose source has changed since")
        captured = read_capture(out)
        if not any(launch.digest in launched for launch in captured.classes):
            raise ValueError("no tensor of a launch has an element")
        show_capture(captured, messages)
        file = write_capture_sweep(captured)
        names = {argument.name.partition("[")[0] for launch in captured.classes for argument in launch.arguments}
        for name in (name for name in ignored if name not in names):
            note(f"--ignore-arg {name}: no captured kernel has this argument{meant(name, names)}")
    except ValueError as error:
        error_line(f"nothing was captured: {error}")
        return False
    if all(launch.problem for launch in captured.classes):
        note(f"none of these launches can be checked or tuned: `kerneltune adopt lint {out}` says why")
        return False
    note(f"wrote {file}: `kerneltune sweep {out}` checks these launches, on a GPU it tunes and times them")
    return True


def _unseen(notes: "ProcessNotes", plain: bool, eager: bool) -> str:
    """Return the kernels that other options capture, as the end of a line; plain, eager: whether the options are given."""
    named = f"; plain @triton.jit, captured only under --plain: {first_of(notes.plain, _SHOWN)}" if notes.plain else ""
    if notes.has_compiled and not eager:
        named += f"; kernels inside torch.compile are seen under --eager{'' if plain else _ALSO_PLAIN}"
    return named


def _reason(notes: "ProcessNotes", pattern: str, code: int, plain: bool) -> str:
    """Return why a program that ended with an exit code left no launch; pattern, plain: of --kernel and --plain."""
    autotuned = notes.autotuned
    for kernel, reason in notes.refused.items():
        return f"{kernel}: {reason}"
    for kernel, subclass in autotuned.items():
        if subclass:
            return f"{kernel}: its autotuner is a {subclass}, whose run does not call Triton's"
    names = [kernel.rpartition(".")[2] for kernel in autotuned]
    if autotuned and not any(fnmatch.fnmatch(name, pattern) for name in (*autotuned, *names)):
        names_or_near = meant(pattern, names) or f": {first_of(sorted(autotuned), _SHOWN)}"
        return f"--kernel {pattern!r} is the name of no kernel of the program{names_or_near}"
    when = "before or in its first launch of a" if code > _SIGNALS else "before it launched a"
    ended = f"the program ended with {code} {when}" if code else "the program launched no"
    return f"{ended} kernel of {'Triton' if plain else 'triton.autotune or kerneltune.autotune'}"
