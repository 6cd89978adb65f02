"""What binary, assembly and metadata of a compiled kernel say of registers, spills and accesses, of either maker's GPUs.

Facts are kept with a hash of this module and of assembly, which between them read all that compilers write. Compiles nothing.
Imports assembly; may import triton, for where its tools are.
"""

import struct
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kerneltune.measuring.assembly import Access, Fact, Kernel, RegisterUsage, gcn_accesses, gcn_usage, ptx_accesses, sass_usage


def needs_binary(backend: str) -> bool:
    """Return whether the assembly alone does not say it all."""
    return backend == "cuda"


def read(backend: str, binary: bytes, assembly: str) -> tuple[RegisterUsage, tuple[Access, ...]]:
    """Read what a kernel uses, and how wide it loads and stores.

    Args:
        backend: triton's, `cuda` or `hip`.
        binary: the cubin; may be empty where it is not needed.
        assembly: PTX or amdgcn.
    """
    if needs_binary(backend):
        return replace(sass_usage(_resources(binary)), stray_stores=_stray_stores(binary)), ptx_accesses(assembly)
    return gcn_usage(assembly), gcn_accesses(assembly)


def compiled(backend: str, binary: bytes, assembly: str, metadata: Mapping[str, Any], cooperative: bool) -> Fact:
    """Return the fact of a kernel that compiled to its end: `read`, and what Triton's metadata say."""
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
    """Instructions that store the stack pointer, as in `Kernel`."""
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
    """Return what the cuobjdump in Triton's package says of a cubin's registers and memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
