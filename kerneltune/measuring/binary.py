"""Read the resources of a compiled kernel from its binary, its assembly and Triton's metadata."""

import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kerneltune.measuring.assembly import Kernel, gcn_accesses, gcn_usage, ptx_accesses, sass_usage
from kerneltune.processes import run_program

_STORES = {0x386, 0x986, 0x388, 0x988, 0x387, 0x987, 0x385, 0x985, 0x844}
"""The lowest twelve bits of the store instructions of sm_90 and sm_100: STG, STS, STL and ST without and with a uniform base, and
STSM, as cuobjdump names them. Bits 32 to 39 are the stored register, or the first of several stored registers."""
_STACK_POINTER = 1


def read_kernel(backend: str, binary: bytes, assembly: str, metadata: Mapping[str, Any], cooperative: bool) -> Kernel:
    """Return the resources of a compiled kernel.

    Args:
        backend: Triton's, `cuda` or `hip`.
        binary: the cubin; not used for `hip`.
        assembly: PTX or amdgcn.
        metadata: Triton's metadata of the kernel.
        cooperative: whether the kernel is launched as a cooperative grid.
    """
    if backend == "cuda":
        usage, accesses, stray_stores = sass_usage(_resource_report(binary)), ptx_accesses(assembly), _stray_stores(binary)
    else:
        usage, accesses, stray_stores = gcn_usage(assembly), gcn_accesses(assembly), 0
    registers, spill_bytes, scalar_registers = usage
    resources = (registers, spill_bytes, metadata["shared"], scalar_registers, accesses, cooperative, stray_stores)
    return Kernel(metadata["name"], metadata["num_warps"], *resources)


def _stray_stores(cubin: bytes) -> int:
    """Count the instructions that store the stack pointer, see `Kernel`."""
    words = (word for code in _code(cubin) for (word, _) in struct.iter_unpack("<QQ", code[: len(code) // 16 * 16]))
    return sum(word & 0xFFF in _STORES and word >> 32 & 0xFF == _STACK_POINTER for word in words)


def _code(cubin: bytes) -> Iterator[bytes]:
    """Yield the sections of a 64-bit ELF file that hold instructions."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<HH", cubin, 0x3A)
    for place in range(table, table + size * count, size):
        _name, _kind, flags, _address, offset, length = struct.unpack_from("<IIQQQQ", cubin, place)
        if flags & 0x4:  # executable
            yield cubin[offset : offset + length]


def _resource_report(cubin: bytes) -> str:
    """Return the report of registers and stack that the cuobjdump in Triton's package prints for a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return str(run_program([str(tool), "-res-usage", file.name], must_succeed=True, text=True).stdout)
