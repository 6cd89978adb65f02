"""Check out another git revision in a temporary work tree, and inspect it in a subprocess.

The subprocess dies with this process, even after SIGKILL. A SIGKILL leaves a temporary folder and git's entry of the work tree:
the next check-out removes both.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

from kerneltune.files import data_root
from kerneltune.inspection.static import Survey, load
from kerneltune.processes import PREFIX, git, held_folder, is_abandoned, run_bound

_LIST_OF_TREES = Lock()
"""Lock for git's list of work trees: git removes the list's folder along with the last entry."""
_PREFIX = f"{PREFIX}tree-"
_TREE = "tree"


def survey_revision(revision: str, arguments: Sequence[str]) -> Survey:
    """Return the rows of `kerneltune inspect ARGUMENTS` in the checkout's `revision`, with the configs of that revision."""
    with checked_out(revision) as tree:
        return inspected(revision, tree, tree.parent / "rows.json", arguments)


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Yield a work tree of the checkout's `revision`, in a temporary folder; remove both afterwards."""
    checkout = data_root("kerneltune").parent
    commit = _git(checkout, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", what=f"{revision!r}: no such revision")
    with _LIST_OF_TREES:
        _remove_abandoned(checkout)
    with held_folder(_PREFIX) as folder:
        tree = folder / _TREE
        try:
            with _LIST_OF_TREES:
                _git(checkout, "worktree", "add", "--detach", str(tree), commit, what=f"cannot check out {revision!r}")
            yield tree
        finally:  # also after an interrupt during `worktree add`
            with _LIST_OF_TREES:
                _remove(checkout, tree)


def _remove_abandoned(checkout: Path) -> None:
    """Remove this module's work trees that killed processes left in git's list; keep all further work trees."""
    listed = _git(checkout, "worktree", "list", "--porcelain", what="cannot list the work trees")
    for line in listed.splitlines():
        tree = Path(line.removeprefix("worktree "))
        ours = line.startswith("worktree ") and tree.name == _TREE and tree.parent.name.startswith(_PREFIX)
        if ours and is_abandoned(tree.parent):
            _remove(checkout, tree)


def _remove(checkout: Path, tree: Path) -> None:
    """Remove a work tree and its entry in git, also after an incomplete `worktree add`.

    A failure is ignored, because the next check-out tries again.
    """
    with suppress(ValueError):
        _git(checkout, "worktree", "remove", "--force", "--force", str(tree), what=f"cannot remove {tree}")


def inspected(revision: str, tree: Path, rows: Path, arguments: Sequence[str]) -> Survey:
    """Return the rows of `kerneltune inspect ARGUMENTS` in the work tree of a revision; the command saves them in `rows`."""
    env = {name: value for name, value in os.environ.items() if name != "KERNELTUNE_CONFIGS"}
    env |= {"TMPDIR": str(tree.parent)}
    code = "from kerneltune.cli import main; main()"
    done = run_bound(code, ["inspect", *arguments, "--save", str(rows)], cwd=tree, env=env)
    if done.returncode or not rows.exists():
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"revision {revision!r} cannot be inspected: {last}")
    return load(rows)


def _git(checkout: Path, *arguments: str, what: str) -> str:
    try:
        return git(checkout, *arguments).decode().strip()
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
