"""Keep the proof of a run of the journeys, and list the journeys without a proof; see proof_file.py."""

import datetime
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from journey import FAILED, JOURNEYS, PASSED, ROOT
from proof_file import PROOF, SCHEMA, JourneyRun, Proof, code_of, digest_of, load_proof, proof_files, unproven
from runner import Ending

sys.path.insert(0, str(ROOT))
from kerneltune.files import replace_text
from kerneltune.wording import counted

DOCUMENTS = ("docs/limitations.md", "README.md")
BLOCK = re.compile(r"(<!-- proof[^>]*-->\n).*?(<!-- end of proof -->)", re.DOTALL)
NUMBERS = re.compile(r"\[[\d,\s]+\]")
VERSIONS = ("driver", "torch", "triton", "python")


def keep(out: Path, gpu: Mapping[str, str], ending: Ending) -> None:
    """Write a journey that passed or failed into the proof of this GPU model, and a copy beside the outputs."""
    if ending.passed not in (PASSED, FAILED):
        return
    commit = os.environ.get("COMMIT") or gpu["commit"]  # a copy of the tree may lack its history
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    versions = {name: gpu[name] for name in VERSIONS}
    run = JourneyRun(ending.passed == PASSED, commit, versions, date, round(ending.seconds, 1), [])
    path = ROOT / "results" / gpu["slug"] / PROOF
    merge_proof(path, gpu["name"], {ending.name: (run, digests(JOURNEYS[ending.name].code(ending.modules)))}, list(JOURNEYS))
    shutil.copy(path, out)


def digests(modules: Iterable[str]) -> dict[str, str]:
    """Return module -> digest, without modules that have no file in the package."""
    return {module: digest for module in modules if (digest := digest_of(module))}


def save_proof(path: Path, gpu: str, runs: Mapping[str, tuple[JourneyRun, Mapping[str, str]]]) -> None:
    """Write a proof whole: the given runs with their modules and digests, in the order of the names."""
    lines = sorted({f"{module} {digest}" for _, code in runs.values() for module, digest in code.items()})
    numbers = {line: number for number, line in enumerate(lines)}
    journeys = {
        name: msgspec.structs.replace(run, code=[numbers[f"{module} {digest}"] for module, digest in sorted(code.items())])
        for name, (run, code) in sorted(runs.items())
    }
    encoded = msgspec.json.encode(Proof(schema=SCHEMA, gpu=gpu, journeys=journeys, code=lines))
    text = msgspec.json.format(encoded, indent=1).decode()
    replace_text(path, NUMBERS.sub(lambda matched: " ".join(matched[0].split()), text) + "\n")


def merge_proof(path: Path, gpu: str, runs: Mapping[str, tuple[JourneyRun, Mapping[str, str]]], names: Sequence[str]) -> None:
    """Put runs into the proof of a file; runs of journeys that are not known any more go, a damaged proof is replaced."""
    kept: dict[str, tuple[JourneyRun, Mapping[str, str]]] = {}
    if path.is_file():
        try:
            proof = load_proof(path)
            kept = {name: (run, code_of(proof, name)) for name, run in proof.journeys.items() if name in names}
        except ValueError:
            pass
    path.parent.mkdir(parents=True, exist_ok=True)
    save_proof(path, gpu, kept | dict(runs))


def state_line(proofs: Sequence[Proof], journeys: Sequence[str]) -> str:
    """Return a sentence that counts the journeys that have passed with the present code, on any GPU and on each that has one."""
    names = dict.fromkeys((*journeys, *(name for proof in proofs for name in proof.journeys)))
    proven = [(count, proof) for proof in proofs if (count := len(names) - len(dict(unproven(proof, names))))]
    counts = []
    for count, proof in proven:
        last = max(proof.journeys.values(), key=lambda run: run.date)
        of_all = f"{count} " if len(proven) > 1 else ""
        counts.append(f", {of_all}on {proof.gpu} (last run {last.date[:10]} at {last.commit})")
    passed = len(names) - len(open_journeys(proofs, journeys))
    return f"{passed} of {counted(len(names), 'journey')} of `make gpu` passed with the present code{''.join(counts)}"


def open_journeys(proofs: Sequence[Proof], journeys: Sequence[str]) -> dict[str, list[str]]:
    """Return each journey that has passed with the present code on no GPU, with a reason for each GPU."""
    names = dict.fromkeys((*journeys, *(name for proof in proofs for name in proof.journeys)))
    reasons = [dict(unproven(proof, names)) for proof in proofs]
    return {name: [of_gpu[name] for of_gpu in reasons] for name in names if all(name in of_gpu for of_gpu in reasons)}


def show(names: Sequence[str], is_written: bool) -> int:
    """List the journeys that have passed with the present code on no GPU; is_written: also write the state into the documents."""
    proofs = []
    for path in proof_files():
        try:
            proofs.append(load_proof(path))
        except ValueError as error:
            print(error)
    state = state_line(proofs, names) if proofs else "no journey of `make gpu` has run with the present code"
    print(state)
    for name, reasons in open_journeys(proofs, names).items() if proofs else ():
        print(f"  {name}: {'; '.join(reasons)}")
    for name in DOCUMENTS if is_written else ():
        _write(ROOT / name, state)
    return 0


def _write(path: Path, state: str) -> None:
    """Put the state between the two marks of a document; a document without marks stays."""
    text = path.read_text(encoding="utf-8")
    line = f"- {state[0].upper()}{state[1:]}.\n"
    changed = BLOCK.sub(lambda matched: matched[1] + line + matched[2], text)
    if changed != text:
        path.write_text(changed, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
