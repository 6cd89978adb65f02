"""Compile the configs that differ between a git revision and this checkout, on both sides, for the static gate.

A config is unchanged if the revision has the same config for the case and the same code: the digests of the variant and of the
operator's inputs are equal. Compiled rows are stored in files under a digest of everything that decides them, so that an
interrupted gate does not compile them again.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kerneltune import cache, device
from kerneltune.files import read_text
from kerneltune.identity import code_digest
from kerneltune.inspection.revision import checked_out, inspected
from kerneltune.inspection.static import StaticRow, Survey, load, save
from kerneltune.inspection.survey import SurveyRequest, case_text
from kerneltune.measuring.inspected import reader_digest
from kerneltune.processes import run_bound
from kerneltune.run_options import Progress
from kerneltune.search.task import config_values

_DIGESTS = """
import json, sys
from kerneltune import ops
from kerneltune.identity import code_digest
found = {
    name: {variant.name: variant.source_hash + code_digest(op.inputs) for variant in op.variants if variant.config is not None}
    for name, op in ops.load().items()
}
open(sys.argv[1], "w").write(json.dumps(found))
"""
MOST_KEPT = 256
"""Number of row files that are kept. A gate uses a file per variant of the revision, and a file per operator of this checkout."""
_Digests = Mapping[str, Mapping[str, str]]
_Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Changes:
    """Hold the configs and rows that differ between a revision and this checkout.

    Attributes:
        earlier: rows of the revision whose config is changed or missing in this checkout.
        requests: changed configs of this checkout.
        unchanged: number of configs that need not be compiled.
    """

    earlier: Survey
    requests: tuple[SurveyRequest, ...]
    unchanged: int


def changes_since(
    revision: str,
    requests: Sequence[SurveyRequest],
    targets: Sequence[str],
    gpu: str,
    arguments_of: Callable[[str, str], list[str]],
    folder: Path,
    progress: Progress,
) -> Changes:
    """Find the configs that differ between a git revision and this checkout, and compile the revision's side.

    Args:
        revision: the git revision to compare with.
        requests: all judged configs of this checkout.
        targets: architectures to compile for.
        gpu: folder of the GPU model in `configs/`.
        arguments_of: (operator, variant) -> arguments of `kerneltune inspect` in the revision.
        folder: the folder for row files.
        progress: observer, told of each compiled variant.

    Raises:
        ValueError: the checkout or the revision does not exist, or the revision cannot be inspected; the message is one line.
    """
    with checked_out(revision) as tree:
        there, entries = _digests_of(tree), _entries(tree, gpu, {request.op.name for request in requests})
        keys = {_key(request): request for request in requests}
        changed = {key: r for key, r in keys.items() if not _is_unchanged(r, there, entries.get(key))}
        earlier: list[StaticRow] = []
        variants = list(dict.fromkeys((op, variant) for op, variant, *_ in changed))
        progress.stage(f"compile {revision}", len(variants))
        for op, variant in variants:
            of_variant = {" ".join(key): config for key, config in entries.items() if key[:2] == (op, variant)}
            if of_variant:
                compile_there = partial(inspected, revision, tree, tree.parent / "rows.json", arguments_of(op, variant))
                code = there.get(op, {}).get(variant)
                decides = [arguments_of(op, variant), code, of_variant]
                rows = (kept(folder, targets, decides, compile_there) if code is not None else compile_there()).rows
                earlier += [row for row in rows if row.key[:4] in changed or row.key[:4] not in keys]
            progress.advance(f"{op} {variant}")
    found = Survey(device.versions()["triton"], tuple(earlier))
    return Changes(found, tuple(changed.values()), len(keys) - len(changed))


def survey_here(
    requests: Sequence[SurveyRequest],
    targets: Sequence[str],
    compile_all: Callable[[Sequence[SurveyRequest]], Survey],
    folder: Path,
) -> Survey:
    """Compile requests operator by operator, except operators whose rows an earlier gate stored."""
    found: list[StaticRow] = []
    for op in dict.fromkeys(request.op.name for request in requests):
        asked = [request for request in requests if request.op.name == op]
        decides = [[*_key(request), _digest(request), config_values(request.config)] for request in asked]
        found += kept(folder, targets, decides, partial(compile_all, asked)).rows
    return Survey(device.versions()["triton"], tuple(found))


def _key(request: SurveyRequest) -> _Key:
    return request.op.name, request.variant.name, case_text(request.case), request.policy


def _digest(request: SurveyRequest) -> str:
    return request.variant.source_hash + code_digest(request.op.inputs)


def _is_unchanged(request: SurveyRequest, there: _Digests, config: Mapping[str, Any] | None) -> bool:
    """Return whether code and config equal the revision's; a knob that the revision's config lacks takes its default."""
    if config is None or there.get(request.op.name, {}).get(request.variant.name) != _digest(request):
        return False
    try:
        return bool(request.variant.config_from(config) == request.config)
    except ValueError:
        return False


def _digests_of(tree: Path) -> _Digests:
    """Return the digests of a work tree's variants; empty if its package is too old to give digests."""
    path = tree.parent / "digests.json"
    env = os.environ | {"TMPDIR": str(tree.parent)}
    done = run_bound(_DIGESTS, [str(path)], cwd=tree, env=env)
    if done.returncode or not path.is_file():
        return {}
    found: _Digests = json.loads(read_text(path))
    return found


def _entries(tree: Path, gpu: str, ops: Iterable[str]) -> dict[_Key, Mapping[str, Any]]:
    """Return the cached configs of a work tree as knob values."""
    root = tree / "configs"
    found = ((op, entry) for op in ops if (root / gpu / f"{op}.json").is_file() for entry in cache.load(op, gpu, root))
    return {(op, entry.variant, case_text(entry.as_case), entry.policy): entry.config for op, entry in found}


def kept(folder: Path, targets: Sequence[str], decides: object, compile_all: Callable[[], Survey]) -> Survey:
    """Return the survey that an earlier gate stored for the same inputs; else compile it, store it, and remove old files."""
    everything = [device.versions()["triton"], list(targets), reader_digest(), decides]
    path = folder / f"{hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:20]}.json"
    if path.is_file():
        try:
            found = load(path)
            with suppress(OSError):  # the folder is read-only
                path.touch()
            return found
        except ValueError:  # a damaged file: compile again
            pass
    made = compile_all()
    save(path, made)
    _prune(folder)
    return made


def _prune(folder: Path) -> None:
    """Remove all row files except the MOST_KEPT files that were used last."""
    with suppress(OSError):  # another gate may remove the same file first
        for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-MOST_KEPT]:
            path.unlink()
