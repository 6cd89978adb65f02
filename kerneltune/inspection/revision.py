"""Compile another git revision of the checkout, and find the configs that differ between the revision and this checkout.

The revision is unpacked in a temporary folder and inspected in a subprocess. The subprocess dies with this process, even after
SIGKILL. The next process that makes a temporary folder removes the folder.

A config is unchanged if the revision has the same config for the case and the same code: the digests of the variant and of the
operator's inputs are equal.
"""

import io
import json
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kerneltune import cache, device
from kerneltune.files import data_root, read_text
from kerneltune.identity import code_digest
from kerneltune.inspection.static import StaticRow, Survey, load
from kerneltune.processes.programs import git, run_bound
from kerneltune.processes.start import held_folder
from kerneltune.progress import Progress
from kerneltune.spec import TaskKey
from kerneltune.task import Run

_DIGESTS = """
import json, sys
from kerneltune import ops
from kerneltune.identity import code_digest
digests = {
    name: {variant.name: variant.source_hash + code_digest(op.inputs) for variant in op.variants if variant.config is not None}
    for name, op in ops.load().items()
}
open(sys.argv[1], "w").write(json.dumps(digests))
"""
_Digests = Mapping[str, Mapping[str, str]]


def changes_since(
    revision: str, runs: Sequence[Run], gpu: str, arguments: Sequence[str], progress: Progress
) -> tuple[Survey, list[Run]]:
    """Find the configs that differ between a git revision and this checkout, and compile the revision's side.

    Return the rows of the revision whose config is changed or missing in this checkout, and the changed configs of this checkout.

    Args:
        runs: all judged configs of this checkout.
        arguments: options of `kerneltune inspect` in the revision, without operator and variant.
    """
    with unpacked(revision) as tree:
        digests, ops = _digests_of(tree), {task.op.name for task, _ in runs}
        configs = {_key(entry.key): entry.config for op in ops for entry in cache.load(op, gpu, tree / "configs")}
        keys = {_key(run.task.key): run for run in runs}
        changed = {key: run for key, run in keys.items() if not _is_unchanged(run, digests, configs.get(key))}
        earlier: list[StaticRow] = []
        variants = list(dict.fromkeys((op, variant) for op, variant, *_ in changed))
        progress.stage(f"compile {revision}", len(variants))
        for op, variant in variants:
            if any(key[:2] == (op, variant) for key in configs):
                rows = inspected(revision, tree, [op, f"--variant={variant}", *arguments]).rows
                earlier += [row for row in rows if row.key[:4] in changed or row.key[:4] not in keys]
            progress.advance(f"{op} {variant}")
    survey = Survey(device.versions()["triton"], tuple(earlier))
    return survey, list(changed.values())


def _key(key: TaskKey) -> tuple[str, str, str, str]:
    return key.op, key.variant, key.case.label, key.policy


def _is_unchanged(run: Run, digests: _Digests, earlier: Mapping[str, Any] | None) -> bool:
    """Return whether code and config equal the revision's; a knob that the revision's config lacks takes its default.

    digests, earlier: the revision's digests by operator and variant, and its config of the case; None without a config.
    """
    task, config = run
    digest = task.variant.source_hash + code_digest(task.op.inputs)
    if earlier is None or digests.get(task.op.name, {}).get(task.variant.name) != digest:
        return False
    try:
        return bool(task.variant.config_from(earlier) == config)
    except ValueError:
        return False


def _digests_of(tree: Path) -> _Digests:
    """Return the digests of the variants in the files of a revision; empty if its package is too old to give digests."""
    path = tree.parent / "digests.json"
    env = os.environ | {"TMPDIR": str(tree.parent)}
    done = run_bound(_DIGESTS, [str(path)], cwd=tree, env=env)
    if done.returncode or not path.is_file():
        return {}
    digests: _Digests = json.loads(read_text(path))
    return digests


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
    env = {name: value for name, value in os.environ.items() if name != cache.CONFIGS}
    env |= {"TMPDIR": str(tree.parent), "PYTHONDONTWRITEBYTECODE": "1"}  # after a kill the tree is removed while the command ends
    code = "from kerneltune.cli import main; main()"
    done = run_bound(code, ["inspect", *arguments, "--save", str(rows)], cwd=tree, env=env)
    if done.returncode or not rows.exists():
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ValueError(f"revision {revision!r} cannot be inspected: {last}")
    return load(rows)
