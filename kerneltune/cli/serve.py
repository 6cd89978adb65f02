"""`kerneltune serve`: run a program with the tuned configs of a capture."""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from kerneltune.adopt import startup
from kerneltune.cli import options as o
from kerneltune.cli.capture import NOT_FOUND, Program
from kerneltune.cli.console import messages, note, show_table
from kerneltune.wording import counted

_SHOWN = 12
"""Kernels that are shown."""


def command(
    program: Program,
    configs: Annotated[Path, o.option("--configs", "DIR", "Folder that `tune` wrote.", envvar="KERNELTUNE_ADOPT")],
    miss: Annotated[str, o.pick("--miss", startup.MISS_POLICIES, "The config of launches that were not tuned.")] = "author",
    manifest: Annotated[str, o.option("--manifest", "SHA256", "Refuse any other table; the digest's beginning is enough.")] = "",
) -> None:
    """Run a program with the tuned configs of a capture; nothing is timed at run time.

    Subprocesses are served as well. Launches that were not tuned are recorded in DIR/misses; `tune DIR` tunes them as well. The
    command ends with the program's exit code. The program's output is untouched; the counts of launches by kernel go to
    standard error at the end.
    """
    from kerneltune.adopt.counters import SUFFIX, read_counts
    from kerneltune.adopt.program import run_program
    from kerneltune.adopt.table import check_manifest

    if not configs.is_dir():
        raise ValueError(f"configs: {configs}: {'a file' if configs.exists() else 'no such folder'}: expected a folder of `tune`")
    if not (configs / "served").is_dir():
        raise ValueError(f"{configs}: no tuned configs: run `kerneltune tune {configs}` first")
    if manifest:
        check_manifest(configs, manifest)
    with tempfile.TemporaryDirectory(prefix="kerneltune-") as folder:
        files = Path(folder, "counts")  # below a folder that goes: a process that outlives the program makes it no more
        chosen = {"miss": miss, "manifest": manifest, "counts": str(files)}
        environment = {startup.ADOPT: str(configs.resolve()), startup.ADOPT_OPTIONS: json.dumps(chosen)}
        code = run_program(program, environment | {startup.STARTED: str(Path(folder, "started"))})
        counts, is_found = read_counts(files.glob(f"*{SUFFIX}")), Path(folder, "started").exists()
    if is_found:
        _show_counts(counts, configs)
    else:
        note(f"nothing was served: {NOT_FOUND}")
    raise typer.Exit(code)


def _show_counts(counts: Mapping[str, int], configs: Path) -> None:
    """Print by kernel how many launches were served, how many were not tuned, and how many fell back from a config that fails."""
    from kerneltune.adopt.folder import CLASSES, MISSES
    from kerneltune.adopt.plain_serving import FELL_BACK, MISSED, SERVED

    served, missed, fallen = (_by_kernel(counts, kind) for kind in (SERVED, MISSED, FELL_BACK))
    kernels = sorted(served | missed | fallen, key=lambda kernel: (-missed[kernel], -fallen[kernel], -served[kernel], kernel))
    if not kernels:
        note("no launch of an autotuned kernel was seen")
        return
    rows = [(kernel, *(str(count[kernel]) for count in (served, missed, fallen))) for kernel in kernels[:_SHOWN]]
    show_table(("kernel", "served", "not tuned", "fell back"), rows, messages)
    more = f" (the first {_SHOWN} of {len(kernels)} kernels are shown)" if len(kernels) > _SHOWN else ""
    note(f"{counted(served.total(), 'launch', 'launches')} served, {missed.total()} not tuned, {fallen.total()} fell back{more}")
    if missed and (configs / MISSES / CLASSES).is_dir():
        note(f"launches that were not tuned are recorded: kerneltune tune {configs}")
    elif missed:
        note(f"launches that were not tuned are not recorded: capture the program into {configs} again, then tune it")


def _by_kernel(counts: Mapping[str, int], kind: str) -> Counter[str]:
    """Return kernel -> the count of its launches of a kind; kernels without such launches are left out."""
    prefix = f"{kind} "
    return Counter({name.removeprefix(prefix): count for name, count in counts.items() if count and name.startswith(prefix)})
