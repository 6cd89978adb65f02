"""Keep the proof of a run of the journeys, and list the journeys without a proof; see kerneltune/inspection/proof.py."""

import datetime
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from journey import FAILED, JOURNEYS, PASSED, ROOT
from runner import Ending

sys.path.insert(0, str(ROOT))
from kerneltune.inspection.proof import (
    PROOF,
    JourneyRun,
    digests,
    load_proof,
    merge_proof,
    proof_files,
    state_line,
    unproven,
)

DOCUMENTS = ("docs/limitations.md", "README.md")
BLOCK = re.compile(r"(<!-- proof[^>]*-->\n).*?(<!-- end of proof -->)", re.DOTALL)
VERSIONS = ("driver", "torch", "triton", "python")


def keep(out: Path, gpu: Mapping[str, str], endings: Sequence[Ending]) -> None:
    """Write what passed and failed into the proof of this GPU model, and a copy beside the outputs."""
    commit = os.environ.get("COMMIT") or gpu["commit"]  # a copy of the tree may lack its history
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {name: gpu[name] for name in VERSIONS}
    runs = {
        one.name: (
            JourneyRun(one.passed == PASSED, commit, versions, date, round(one.seconds, 1), []),
            digests(JOURNEYS[one.name].code(one.modules)),
        )
        for one in endings
        if one.passed in (PASSED, FAILED)
    }
    path = ROOT / "results" / gpu["slug"] / PROOF
    merge_proof(path, gpu["name"], runs, list(JOURNEYS))
    shutil.copy(path, out)


def show(known: Sequence[str], is_written: bool) -> int:
    """List the journeys that have not passed with the present code; is_written: also write the state into the documents."""
    states = []
    for path in proof_files():
        try:
            found = load_proof(path)
        except ValueError as error:
            print(error)
            continue
        states.append(state_line(found, known))
        print(states[-1])
        for name, why in unproven(found, known):
            print(f"  {name}: {why}")
    if not states:
        states.append("no journey of `make gpu` has run with the present code")
        print(states[0])
    for name in DOCUMENTS if is_written else ():
        _write(ROOT / name, states)
    return 0


def _write(path: Path, states: Sequence[str]) -> None:
    """Put the state between the two marks of a document; a document without marks stays."""
    text = path.read_text(encoding="utf-8")
    lines = "".join(f"- {state[0].upper()}{state[1:]}.\n" for state in states)
    changed = BLOCK.sub(lambda found: found[1] + lines + found[2], text)
    if changed != text:
        path.write_text(changed, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
