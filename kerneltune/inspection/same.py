"""Whether cached configs launch now what they launched when they were chosen: no GPU is asked, and git has to have that commit.

Kernels are compared as Triton's own IR with their compile options, launches by grid and scalar arguments. What a wrapper does in
torch besides is not compared. Knows no operator by name. Imports the standard library, cache, files and revision.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kerneltune.cache import Entry
from kerneltune.files import data_root
from kerneltune.inspection import launches
from kerneltune.inspection.revision import checked_out

SAME_CODE = "same_code"
"""Of an entry's evidence: the source hash that was measured, where another one was found to launch the same."""

_SM_90 = ("nvidia_h100", "nvidia_h200", "nvidia_gh200")
"""How the folders of those GPUs begin for whose kind kernels are compiled here."""

Found = list[tuple[str, str]]
"""(source hash of the operator, digest of what is launched; empty where that revision cannot) of each entry."""


def measured_hash(entry: Entry) -> str:
    """The hash of the source that was measured when the entry was chosen."""
    proven = entry.evidence.get(SAME_CODE)
    return str(proven["source_hash"] if isinstance(proven, dict) else entry.evidence.get("source_hash"))


def comparable(gpu: str) -> bool:
    """Whether what `differences` compiles is what this GPU, named as its folder, would launch."""
    return gpu.startswith(_SM_90)


def differences(operators: str, entries: Sequence[tuple[str, Entry]], advance: Callable[[str], None]) -> list[str]:
    """Why each (operator's name, entry) does not surely launch what it launched when it was chosen; empty where it does.

    Args:
        operators: the module whose `load` gives the operators, in any revision.
        advance: called after each commit, with its name. As many are asked at once as there are cores.
    """
    reasons = [""] * len(entries)
    by_commit: dict[str, list[int]] = {}
    for number, (_op, entry) in enumerate(entries):
        by_commit.setdefault(str(entry.evidence.get("commit") or ""), []).append(number)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        found = threads.map(lambda pair: _since(operators, pair[0], [entries[n] for n in pair[1]]), by_commit.items())
        for (commit, numbers), answer in zip(by_commit.items(), found, strict=True):
            for number, reason in zip(numbers, answer, strict=True):
                reasons[number] = reason
            advance(commit)
    return reasons


def _since(operators: str, commit: str, entries: Sequence[tuple[str, Entry]]) -> list[str]:
    """The reasons of entries that were chosen at one commit."""
    with tempfile.TemporaryDirectory(prefix="kerneltune-") as folder:
        try:
            with checked_out(commit) as tree:
                then = _launched(operators, entries, tree, Path(folder))
            now = _launched(operators, entries, data_root("kerneltune").parent, Path(folder))
        except ValueError as error:
            return [str(error)] * len(entries)
    return [_difference(entry, *pair) for (_op, entry), pair in zip(entries, zip(then, now, strict=True), strict=True)]


def _difference(entry: Entry, then: tuple[str, str], now: tuple[str, str]) -> str:
    commit = entry.evidence.get("commit")
    if "" in (then[0], now[0]):
        return "its operator is not among those of this package"
    if then[0] != measured_hash(entry):
        return f"commit {commit} has not the source that was measured"
    if not then[1] or not now[1]:
        return f"what it launches is not known {'now' if then[1] else f'at commit {commit}'}"
    return "" if then[1] == now[1] else f"it launches other kernels than at commit {commit}"


def _launched(operators: str, entries: Sequence[tuple[str, Entry]], tree: Path, folder: Path) -> Found:
    """What the package in `tree` launches, in a process of its own.

    Raises:
        ValueError: it cannot be asked; one line.
    """
    asked, answer = folder / "asked.json", folder / "answer.json"
    asked.write_text(json.dumps([_values(op, entry) for op, entry in entries]), encoding="utf-8")
    answer.unlink(missing_ok=True)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(tree), "TRITON_CACHE_DIR": str(folder / "triton")}
    command = [sys.executable, "-P", launches.__file__, operators, str(asked), str(answer)]
    done = subprocess.run(command, cwd=tree, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode or not answer.exists():
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"its source cannot be asked: {last}")
    return [(source, digest) for source, digest in json.loads(answer.read_text(encoding="utf-8"))]


def _values(op: str, entry: Entry) -> dict[str, Any]:
    names = ("variant", "case", "dtype", "quant", "config")
    sizes = {"axes": dict(entry.axes), "options": dict(entry.options)}
    return {"op": op, **{name: getattr(entry, name) for name in names}, **sizes}
