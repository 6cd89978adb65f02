"""Another git revision in a temporary work tree, and the same inspection of it in a process of its own.

Compiles nothing itself. Imports the standard library, cache and static.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from kerneltune.files import data_root
from kerneltune.inspection.static import Survey, load

_LIST_OF_TREES = Lock()
"""git keeps one list, whose folder goes with its last entry."""


def survey_revision(revision: str, arguments: Sequence[str]) -> Survey:
    """What `kerneltune inspect ARGUMENTS` finds in the checkout's `revision`, with the configs of that revision.

    Raises:
        ValueError: no checkout, no such revision, or one whose command cannot do it; one line.
    """
    with checked_out(revision) as tree:
        return _inspected(revision, tree, tree.parent / "rows.json", arguments)


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A work tree of the checkout's `revision`, in a temporary folder of its own; both are gone afterwards.

    Raises:
        ValueError: no checkout or no such revision; one line.
    """
    checkout = data_root("kerneltune").parent
    commit = _git(checkout, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", what=f"{revision!r}: no such revision")
    with tempfile.TemporaryDirectory(prefix="kerneltune-") as folder:
        tree = Path(folder) / "tree"
        with _LIST_OF_TREES:
            _git(checkout, "worktree", "add", "--detach", str(tree), commit, what=f"cannot check out {revision!r}")
        try:
            yield tree
        finally:
            with _LIST_OF_TREES:
                _git(checkout, "worktree", "remove", "--force", str(tree), what=f"cannot remove {tree}")


def _inspected(revision: str, tree: Path, rows: Path, arguments: Sequence[str]) -> Survey:
    command = [sys.executable, "-c", "from kerneltune.cli import main; main()", "inspect", *arguments, "--save", str(rows)]
    env = {name: value for name, value in os.environ.items() if name != "KERNELTUNE_CONFIGS"}
    done = subprocess.run(command, cwd=tree, env=env | {"PYTHONPATH": str(tree)}, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True)  # fmt: skip
    if done.returncode or not rows.exists():
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"revision {revision!r} cannot be inspected: {last}")
    return load(rows)


def _git(checkout: Path, *arguments: str, what: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(checkout), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise ValueError(f"{what}: git is not installed") from None
    if done.returncode:
        raise ValueError(f"{what}: {(done.stderr.strip().splitlines() or ['in ' + str(checkout)])[-1]}")
    return done.stdout.strip()
