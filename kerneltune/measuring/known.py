"""Kernels that were compiled before: what the compiler said of each, by a digest of everything that decides it.

One text file per target, one line per kernel, made by `inspect --renew`. The digest is of Triton's own IR, the options, the
target, the versions of triton and assembler; the file's head is of the code that read what they wrote, without its comments. A
file that is old, not there, or read by other code costs time alone. So does a damaged line, for each has a check of its own.
Compiles nothing. Imports the standard library, assembly, reading, files and sources.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kerneltune.files import data_root, replace_text
from kerneltune.identity import module_digest
from kerneltune.measuring import reading
from kerneltune.measuring.assembly import Access, Fact, Kernel

_COLUMNS = (
    *("kernel", "digest", "check", "warps", "registers", "spill_bytes", "shared_bytes", "scalar_registers", "tensor_columns"),
    *("cooperative", "stray_stores", "loads", "stores"),
)
_CHECK_DIGITS = 8


@dataclass(frozen=True)
class KnownFacts:
    """Facts of one target by digest.

    Attributes:
        refused: there are some that other code read, which are not among them.
    """

    facts: Mapping[str, Fact]
    refused: bool = False

    @cached_property
    def check(self) -> str:
        """Of all of them."""
        return _sha256("\n".join(line(*pair) for pair in sorted(self.facts.items(), key=lambda pair: pair[0])))


def line(digest: str, fact: Fact) -> str:
    """Write one line of a file; `parse` reads it."""
    kernel = fact.kernel
    accesses = (",".join(f"{a.bits}x{a.count}" for a in kernel.accesses if a.kind == kind) or "-" for kind in ("load", "store"))
    numbers = (kernel.warps, kernel.registers, kernel.spill_bytes, kernel.shared_bytes, kernel.scalar_registers)
    values = "\t".join((*map(str, (*numbers, fact.tensor_columns, int(kernel.cooperative), kernel.stray_stores)), *accesses))
    return f"{kernel.name}\t{digest}\t{_check(kernel.name, digest, values)}\t{values}"


def parse(text: str) -> tuple[str, Fact]:
    """Digest and fact of a line.

    Raises:
        ValueError: it is not as `line` wrote it.
    """
    name, digest, check, values = text.split("\t", 3)
    if check != _check(name, digest, values):
        raise ValueError(f"{name} {digest}: damaged")
    *numbers, loads, stores = values.split("\t")
    warps, registers, spill_bytes, shared_bytes, scalar_registers, tensor_columns, cooperative, stray = map(int, numbers)
    accesses = _accesses("load", loads) + _accesses("store", stores)
    resources = (registers, spill_bytes, shared_bytes, scalar_registers, accesses, bool(cooperative), stray)
    return digest, Fact(Kernel(name, warps, *resources), tensor_columns)


def shipped() -> Path:
    """Return the folder of this package's files."""
    return data_root("results") / "static"


def load(folder: Path, target: str) -> KnownFacts:
    """Load what a folder knows of a target.

    Nothing is known of lines that are not as they were written, or that other code read, and nothing without a file.
    """
    try:
        rows = _file(folder, target).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return KnownFacts({})
    if rows[:1] != [_head()]:
        return KnownFacts({}, refused=True)
    facts = {}
    for row in rows[2:]:
        try:
            digest, fact = parse(row)
        except ValueError:
            continue
        facts[digest] = fact
    return KnownFacts(facts)


def save(folder: Path, target: str, facts: Mapping[str, Fact]) -> None:
    """Write a target's file, its lines sorted by kernel.

    Raises:
        ValueError: it cannot be written; it is as before then.
    """
    rows = sorted(line(digest, fact) for digest, fact in facts.items())
    replace_text(_file(folder, target), "\n".join([_head(), "\t".join(_COLUMNS), *rows]) + "\n")


def _head() -> str:
    """Return the first line of a file that this code may read."""
    return f"# read by {module_digest(reading.__name__)}"


def _file(folder: Path, target: str) -> Path:
    return folder / f"{target}.tsv"


def _accesses(kind: str, text: str) -> tuple[Access, ...]:
    pairs = (item.split("x") for item in text.split(",") if item != "-")
    return tuple(Access(kind, int(bits), int(count)) for bits, count in pairs)


def _check(name: str, digest: str, values: str) -> str:
    return _sha256(f"{name} {digest} {values}")[:_CHECK_DIGITS]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
