"""Inspect compiled kernels without launching them, and end a compilation early if its fact is known.

A fact is the resources of a compiled kernel. Its key is a digest of all inputs of the compilation: Triton's first IR, the
options, the target, and the versions of triton and the assembler. `inspect --renew` writes the facts of a target into a text
file, a line per kernel. The file's first line is a digest of the code that parses the output of the compilers. Each line has a
checksum. If the file is missing, its digest is old, or a line is damaged, the kernels are compiled again. The module decides
nothing about configs.
"""

import hashlib
import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from kerneltune.files import data_root, replace_text
from kerneltune.identity import code_digest, module_digest
from kerneltune.measuring.assembly import Access, Fact, Kernel, RegisterUsage, gcn_accesses, gcn_usage, ptx_accesses, sass_usage

FACT = "inspected_by_kerneltune"
"""Field of a compiled kernel's metadata that holds its line of a file of facts."""

_PLACE = re.compile(r'"([^"\n]*)":(\d+)(?=:\d)')
_DIGEST = "digest_by_kerneltune"
_DIGITS = 20

Stage = Callable[[Any, Any], Any]
_COLUMNS = (
    *("kernel", "digest", "check", "warps", "registers", "spill_bytes", "shared_bytes", "scalar_registers", "tensor_columns"),
    *("cooperative", "stray_stores", "loads", "stores"),
)
_CHECK_DIGITS = 8


def needs_binary(backend: str) -> bool:
    """Return whether reading the resources needs the binary besides the assembly."""
    return backend == "cuda"


def read(backend: str, binary: bytes, assembly: str) -> tuple[RegisterUsage, tuple[Access, ...]]:
    """Read the registers of a kernel, and the widths of its loads and stores.

    Args:
        backend: triton's, `cuda` or `hip`.
        binary: the cubin; may be empty if `needs_binary` returns false.
        assembly: PTX or amdgcn.
    """
    if needs_binary(backend):
        return replace(sass_usage(_resources(binary)), stray_stores=_stray_stores(binary)), ptx_accesses(assembly)
    return gcn_usage(assembly), gcn_accesses(assembly)


def compiled_fact(backend: str, binary: bytes, assembly: str, metadata: Mapping[str, Any], cooperative: bool) -> Fact:
    """Return the fact of a completely compiled kernel, from `read` and Triton's metadata."""
    usage, accesses = read(backend, binary, assembly)
    name, warps, shared = (metadata[value] for value in ("name", "num_warps", "shared"))
    resources = (usage.registers, usage.spill_bytes, shared, usage.scalar_registers, accesses, cooperative, usage.stray_stores)
    return Fact(Kernel(name, warps, *resources), metadata.get("tmem_size") or 0)


def too_large(metadata: Mapping[str, Any], shared_bytes: int) -> Fact | None:
    """Return the fact of a kernel that exceeds shared memory, which Triton compiles but refuses to load; else None."""
    shared = metadata.get("shared", 0)
    return Fact(Kernel(metadata["name"], metadata["num_warps"], 0, 0, shared)) if shared > shared_bytes else None


_STORES = {0x386, 0x986, 0x388, 0x988, 0x387, 0x987, 0x385, 0x985, 0x844}
"""The lowest twelve bits of instructions of sm_90 and sm_100 that store: of STG, STS, STL and ST the forms without and with a
uniform base, and of STSM, as cuobjdump names them. Bits 32 to 39 are the register that is stored, or the first of several."""
_STACK_POINTER = 1


def _stray_stores(cubin: bytes) -> int:
    """Count the instructions that store the stack pointer, see `Kernel`."""
    words = (word for code in _code(cubin) for (word, _) in struct.iter_unpack("<QQ", code[: len(code) // 16 * 16]))
    return sum(word & 0xFFF in _STORES and word >> 32 & 0xFF == _STACK_POINTER for word in words)


def _code(cubin: bytes) -> Iterator[bytes]:
    """Return the sections of a 64-bit ELF file that hold instructions."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    for place in range(table, table + size * count, size):
        _name, _kind, flags, _address, offset, length = struct.unpack_from("<IIQQQQ", cubin, place)
        if flags & 0x4:  # executable
            yield cubin[offset : offset + length]


def _resources(cubin: bytes) -> str:
    """Return the resource report that the cuobjdump in Triton's package prints for a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class KnownFacts:
    """Hold the facts of a target by digest.

    Attributes:
        refused: whether the file exists but was dropped, because different code had parsed its facts.
    """

    facts: Mapping[str, Fact]
    refused: bool = False

    @cached_property
    def check(self) -> str:
        """Return the digest of all facts."""
        return _sha256("\n".join(line(*pair) for pair in sorted(self.facts.items(), key=lambda pair: pair[0])))


def line(digest: str, fact: Fact) -> str:
    """Return the file's line for a fact; `parse` reads the line."""
    kernel = fact.kernel
    accesses = (",".join(f"{a.bits}x{a.count}" for a in kernel.accesses if a.kind == kind) or "-" for kind in ("load", "store"))
    numbers = (kernel.warps, kernel.registers, kernel.spill_bytes, kernel.shared_bytes, kernel.scalar_registers)
    values = "\t".join((*map(str, (*numbers, fact.tensor_columns, int(kernel.cooperative), kernel.stray_stores)), *accesses))
    return f"{kernel.name}\t{digest}\t{_check(kernel.name, digest, values)}\t{values}"


def parse(text: str) -> tuple[str, Fact]:
    """Return the digest and the fact of a line.

    Raises:
        ValueError: the line differs from the line that `line` wrote.
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
    """Load the facts of a target from a folder.

    Damaged lines, and lines that different code had parsed, are dropped. Without a file, there are no facts.
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
        ValueError: the file cannot be written; its old content remains.
    """
    rows = sorted(line(digest, fact) for digest, fact in facts.items())
    replace_text(_file(folder, target), "\n".join([_head(), "\t".join(_COLUMNS), *rows]) + "\n")


def reader_digest() -> str:
    """Return the digest of the code that parses the output of the compilers."""
    return code_digest((compiled_fact, too_large))


def _head() -> str:
    """Return the first line of a file that this code may read."""
    return f"# read by {reader_digest()}"


def _file(folder: Path, target: str) -> Path:
    return folder / f"{target}.tsv"


def _accesses(kind: str, text: str) -> tuple[Access, ...]:
    pairs = (item.split("x") for item in text.split(",") if item != "-")
    return tuple(Access(kind, int(bits), int(count)) for bits, count in pairs)


def _check(name: str, digest: str, values: str) -> str:
    return _sha256(f"{name} {digest} {values}")[:_CHECK_DIGITS]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Inspecting:
    """Change the stages of a compilation so that it ends early if its fact is known."""

    def __init__(self, known: KnownFacts, backend: str, shared_bytes: int) -> None:
        """Take the known facts, the name of Triton's backend, and the most shared memory in bytes that a program may use."""
        self.known, self.backend, self.shared_bytes = known, backend, shared_bytes

    @property
    def folder(self) -> str:
        """Return the folder for inspected kernels in Triton's disk cache: a digest of the known facts, the limit and this code.

        The folder holds no binaries. Because Triton 3.6 does not let a hook extend the key of a cache entry, a folder separates
        the entries.
        """
        of = f"{self.known.check} {self.shared_bytes} {module_digest(__name__)}"
        return f"inspected-{hashlib.sha256(of.encode()).hexdigest()[:_DIGITS]}"

    def change(self, backend: Any, stages: Any, options: Any) -> None:
        """Replace the stages by stages that end early if the fact is known."""
        names = list(stages)
        made_for = f"{backend.hash()} {_text(options)} {self.shared_bytes}"
        stages[names[0]] = self._identified(stages[names[0]], made_for)
        for name in names[1:-1]:
            stages[name] = self._unless_known(stages[name])
        stages[names[-1]] = self._settled(stages[names[-1]], bool(options.launch_cooperative_grid))

    def _identified(self, to_ir: Stage, made_for: str) -> Stage:
        """Run the first stage, Triton's first IR, and digest the IR with `made_for`: both together decide all later stages."""

        def stage(source: Any, metadata: Any) -> Any:
            module = to_ir(source, metadata)
            text = f"{ir_text(module)} {made_for} {metadata['triton_version']}"
            digest = metadata[_DIGEST] = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
            metadata["name"] = module.get_entry_func_name()
            if digest in self.known.facts:
                _settle(metadata, self.known.facts[digest])
            return module

        return stage

    def _unless_known(self, compile_further: Stage) -> Stage:
        def stage(source: Any, metadata: Any) -> Any:
            if FACT in metadata:
                return ""
            found = compile_further(source, metadata)
            if fact := too_large(metadata, self.shared_bytes):  # no need of machine code
                _settle(metadata, fact)
            return found

        return stage

    def _settled(self, to_binary: Stage, cooperative: bool) -> Stage:
        def stage(assembly: Any, metadata: Any) -> bytes:
            if FACT not in metadata:
                binary = to_binary(assembly, metadata) if needs_binary(self.backend) else b""
                _settle(metadata, compiled_fact(self.backend, binary, assembly, metadata, cooperative))
            return b""

        return stage


def fact_of(metadata: Any) -> tuple[str, Fact] | None:
    """Return the digest and the fact of a compiled kernel; None for a kernel that was compiled to be launched."""
    return parse(getattr(metadata, FACT)) if hasattr(metadata, FACT) else None


def _settle(metadata: Any, fact: Fact) -> None:
    """Fill in the metadata of a complete compilation, so that Triton can end the compilation here."""
    metadata |= dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
    metadata |= dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)
    metadata |= {"shared": fact.kernel.shared_bytes, "num_warps": fact.kernel.warps, "tmem_size": fact.tensor_columns}
    metadata[FACT] = line(metadata[_DIGEST], fact)


def ir_text(module: Any) -> str:
    """Return the text of Triton's IR.

    The text keeps line information, because it changes the code: ptxas takes the labels around an inlined function for joins of
    its control flow, and allocates other registers. Names of files and distances between lines change no code: the text has
    numbers in their place.
    """
    from triton import knobs

    if knobs.compilation.disable_line_info:
        return str(module.str_nodebug())
    text = module.str()
    lines: dict[str, set[int]] = {}
    for file, number in _PLACE.findall(text):
        lines.setdefault(file, set()).add(int(number))
    places = {(file, str(n)): f"{f}:{rank}" for f, file in enumerate(lines) for rank, n in enumerate(sorted(lines[file]))}
    return _PLACE.sub(lambda place: places[place[1], place[2]], text)


def _text(options: Any) -> str:
    """Return all compile options, libraries by content, and the environment variables that change Triton's code."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    values = dict(options.__dict__)
    values["extern_libs"] = [(name, _file_digest(path)) for name, path in values["extern_libs"]]
    return f"{sorted(values.items())} {sorted(get_cache_invalidating_env_vars().items())}"


@cache
def _file_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
