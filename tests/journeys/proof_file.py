"""Read the proof of a GPU model: which journeys of `make gpu` have passed there, and with which code of the package.

A journey's code is the modules of the package that its processes imported, each by a digest of its syntax tree. Unlike the
digests of kerneltune/identity.py, it covers annotations, which declare options of commands and fields of files, and errors.
"""

import ast
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import msgspec
from journey import ROOT

sys.path.insert(0, str(ROOT))
from kerneltune import device
from kerneltune.files import Versioned, bad, decode_versioned, read_bytes
from kerneltune.wording import first_of

PROOF = "proof.json"
SCHEMA = 1
_DIGITS = 8
_NAMED = 4
"""Changed modules that a line names."""
_PACKAGE = ROOT / "kerneltune"
_PRIVATE = re.compile(r"(?<!alias\()\b(id|name|asname)='(_[^_']\w*)'")
"""A private name in a canonical tree, but no attribute and no import: another module or package may define these."""


class JourneyRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold the last run of a journey.

    Attributes:
        commit: commit of the source, with `+` if the package differed from the commit.
        versions: versions of driver, torch, triton and python.
        date: ISO 8601, UTC.
        code: numbers of the lines of `Proof.code`.
    """

    passed: bool
    commit: str
    versions: dict[str, str]
    date: str
    seconds: float
    code: list[int]


class Proof(Versioned, forbid_unknown_fields=True):
    """Hold the content of a proof.json.

    Attributes:
        gpu: the driver's name of the GPU model.
        journeys: name -> its last run.
        code: `module digest`, each once.
    """

    gpu: str
    journeys: dict[str, JourneyRun]
    code: list[str]


def load_proof(path: Path) -> Proof:
    """Return the proof in a file, which is of the GPU of its folder."""
    try:
        proof = decode_versioned(read_bytes(path), Proof, SCHEMA)
        if device.slug(proof.gpu) != path.parent.name:
            raise bad("gpu", proof.gpu, f"the GPU of the folder {path.parent.name}")
        for name, run in proof.journeys.items():
            if not all(0 <= number < len(proof.code) for number in run.code):
                raise bad(f"journeys.{name}.code", run.code, f"numbers below {len(proof.code)}")
        for number, line in enumerate(proof.code):
            if len(line.split()) != 2:
                raise bad(f"code[{number}]", line, "a module and its digest")
    except ValueError as error:
        raise ValueError(f"{path}: {error}: treated as no proof") from error
    return proof


def proof_files() -> list[Path]:
    """Return the proofs of the checkout, one for each GPU model."""
    return sorted((ROOT / "results").glob(f"*/{PROOF}"))


def code_of(proof: Proof, name: str) -> dict[str, str]:
    """Return module -> digest of the code that a journey ran with."""
    return dict(proof.code[number].split() for number in proof.journeys[name].code)


@cache
def digest_of(module: str) -> str:
    """Return the digest of a module's syntax tree, which no comment, docstring or private name changes; empty without a file."""
    base = _PACKAGE.joinpath(*module.split(".")[1:])
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not file.is_file():
        return ""
    numbers: dict[str, int] = {}
    text = _canonical(ast.parse(file.read_bytes()))
    text = _PRIVATE.sub(lambda match: f"{match[1]}={numbers.setdefault(match[2], len(numbers))}", text)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _canonical(value: object) -> str:
    """Return a syntax tree as text, without empty fields and docstrings: every version of Python gives this text."""
    match value:
        case ast.Expr(value=ast.Constant(value=str())):
            return ""
        case list():
            return f"[{','.join(filter(None, map(_canonical, value)))}]"
        case ast.JoinedStr(values=parts):  # Python 3.12 alone writes empty texts into nested format specifications
            value = ast.JoinedStr([part for part in parts if not (isinstance(part, ast.Constant) and part.value == "")])
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [f"{name}={_canonical(item)}" for name, item in ast.iter_fields(value) if item is not None and item != []]
    return f"{type(value).__name__}({','.join(fields)})"


def unproven(proof: Proof, journeys: Iterable[str] = ()) -> Iterator[tuple[str, str]]:
    """Yield each journey that has not passed with the present code, and the reason.

    journeys: names of journeys that may never have run.
    """
    for name in dict.fromkeys((*journeys, *proof.journeys)):
        run = proof.journeys.get(name)
        if run is None:
            yield name, f"has not run on {proof.gpu}"
        elif not run.passed:
            yield name, f"failed at {run.commit}, {run.date[:10]}"
        elif changed := [module for module, digest in code_of(proof, name).items() if digest_of(module) != digest]:
            short = [module.removeprefix("kerneltune.") for module in changed]
            yield name, f"passed at {run.commit}, {run.date[:10]}; changed since: {first_of(short, _NAMED)}"
