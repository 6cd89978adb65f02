"""What binary and assembly of a compiled kernel say of registers, spills and accesses, of either maker's GPUs.

Compiles nothing. Imports assembly; may import triton, for where its tools are.
"""

import subprocess
import tempfile
from pathlib import Path

from kerneltune.measuring.assembly import Access, Usage, gcn_accesses, gcn_usage, ptx_accesses, sass_usage


def needs_binary(backend: str) -> bool:
    """Whether the assembly alone does not say it all."""
    return backend == "cuda"


def read(backend: str, binary: bytes, assembly: str) -> tuple[Usage, tuple[Access, ...]]:
    """What a kernel uses, and how wide it loads and stores.

    Args:
        backend: triton's, `cuda` or `hip`.
        binary: the cubin; may be empty where it is not needed.
        assembly: PTX or amdgcn.
    """
    if needs_binary(backend):
        return sass_usage(_resources(binary)), ptx_accesses(assembly)
    return gcn_usage(assembly), gcn_accesses(assembly)


def _resources(cubin: bytes) -> str:
    """What the cuobjdump in Triton's package says of a cubin's registers and memory."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
