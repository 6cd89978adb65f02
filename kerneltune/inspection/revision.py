"""Unpack another git revision of the checkout in a temporary folder, and inspect it in a subprocess.

The subprocess dies with this process, even after SIGKILL. The next process that makes a temporary folder removes the folder.
"""

import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kerneltune.files import data_root
from kerneltune.inspection.static import Survey, load
from kerneltune.processes import git, held_folder, run_bound


def survey_revision(revision: str, arguments: Sequence[str]) -> Survey:
    """Return the rows of `kerneltune inspect ARGUMENTS` in the checkout's `revision`, with the configs of that revision."""
    with unpacked(revision) as tree:
        return inspected(revision, tree, arguments)


@contextmanager
def unpacked(revision: str) -> Iterator[Path]:
    """Yield a folder with the files of the checkout's `revision`, in a temporary folder; remove both afterwards."""
    checkout = data_root("kerneltune").parent
    try:
        commit = git(checkout, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").decode().strip()
    except ValueError as error:
        raise ValueError(f"{revision!r}: no such revision: {error}") from error
    with held_folder() as folder, tarfile.open(fileobj=io.BytesIO(git(checkout, "archive", commit))) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.0 to 3.11.3 have none
        archive.extractall(folder / "tree")
        yield folder / "tree"


def inspected(revision: str, tree: Path, arguments: Sequence[str]) -> Survey:
    """Return the rows of `kerneltune inspect ARGUMENTS` in the files of a revision; the command saves them beside the tree."""
    rows = tree.parent / "rows.json"
    env = {name: value for name, value in os.environ.items() if name != "KERNELTUNE_CONFIGS"}
    env |= {"TMPDIR": str(tree.parent), "PYTHONDONTWRITEBYTECODE": "1"}  # after a kill the tree is removed while the command ends
    code = "from kerneltune.cli import main; main()"
    done = run_bound(code, ["inspect", *arguments, "--save", str(rows)], cwd=tree, env=env)
    if done.returncode or not rows.exists():
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"revision {revision!r} cannot be inspected: {last}")
    return load(rows)
