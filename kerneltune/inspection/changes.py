"""Survey what a git revision compiles otherwise, there and here, for the static gate.

A config is unchanged where the revision has the same config for the case and the same code: the digests of the variant and of the
operator's inputs are equal. Rows are kept by everything that decides them, so that an interrupted gate goes on where it was.
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
"""Files of rows that stay, those used last: a gate uses one per variant of the revision, and one per operator here."""
_Digests = Mapping[str, Mapping[str, str]]
_Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Changes:
    """Hold the differences from a revision.

    Attributes:
        earlier: rows of the revision that have a changed counterpart here, or none.
        requests: changed configs of this checkout.
        unchanged: configs that need not be compiled.
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
    """Find the configs that differ from those of a git revision, and compile the revision's.

    Args:
        revision: whose configs and code are held against.
        requests: all configs of this checkout that are judged.
        targets: what is compiled for.
        gpu: folder of the GPU whose configs these are.
        arguments_of: operator, variant -> what `inspect` is called with in the revision.
        folder: where rows are kept.
        progress: told every operator's variant.

    Raises:
        ValueError: no checkout, no such revision, or one that cannot be inspected; one line.
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
    """Compile requests operator by operator, but for operators whose rows an earlier gate kept."""
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
    """Return whether code and config are the revision's; a knob that its config lacks has the default, as for a look-up."""
    if config is None or there.get(request.op.name, {}).get(request.variant.name) != _digest(request):
        return False
    try:
        return bool(request.variant.config_from(config) == request.config)
    except ValueError:
        return False


def _digests_of(tree: Path) -> _Digests:
    """Return the digests of a work tree's variants; none where its package cannot tell, as older ones."""
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
    """Return the survey that an earlier gate kept under all that decides it, else compile and keep it; remove old ones."""
    everything = [device.versions()["triton"], list(targets), reader_digest(), decides]
    path = folder / f"{hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:20]}.json"
    if path.is_file():
        try:
            found = load(path)
            with suppress(OSError):  # read only
                path.touch()
            return found
        except ValueError:  # damaged: compiled again
            pass
    made = compile_all()
    save(path, made)
    _prune(folder)
    return made


def _prune(folder: Path) -> None:
    """Remove all files of rows but those that were used last."""
    with suppress(OSError):  # another gate removes them, too
        for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)[:-MOST_KEPT]:
            path.unlink()
