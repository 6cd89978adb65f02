"""Values of captured tensors: whole numbers as they are, of others a sample and statistics, within a budget of bytes.

Imports the standard library and arguments; torch is the one that the program has loaded.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kerneltune.adopt.arguments import Argument, Storages, Tensor, unwrapped

SAMPLE_BYTES = 1 << 20


@dataclass(slots=True)
class Values:
    """What is kept of a launch's memory.

    Attributes:
        tensors: bytes of each storage by name `storage.N`, on the CPU.
        kinds: for every storage its bytes, what is kept, and statistics.
        left_out: bytes of whole numbers that the budget did not allow.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[dict[str, Any], ...] = ()
    left_out: int = 0

    @property
    def bytes(self) -> int:
        """Return bytes that are kept."""
        return sum(int(tensor.numel()) for tensor in self.tensors.values())

    @classmethod
    def missing(cls, count: int) -> "Values":
        """Return what is kept where memory may not be read: nothing."""
        return cls(kinds=tuple({"kept": "missing"} for _ in range(count)))


def span(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Return the first byte of a storage that any of its tensors covers, and the one behind the last."""
    return min(tensor.offset for tensor in tensors), max(tensor.end for tensor in tensors)


def collect(arguments: Sequence[Argument], storages: Storages, bytes_left: int) -> Values:
    """Copy what is to be kept of a launch's memory, before the launch changes it. Waits for the GPU."""
    values = Values()
    kinds = []
    for number, live in enumerate(storages.live):
        tensors = [a.tensor for a in arguments if a.tensor is not None and a.tensor.storage == number]
        begin, end = span(tensors)
        is_whole = any(tensor.is_whole for tensor in tensors)
        wanted = end - begin if is_whole else min(end - begin, SAMPLE_BYTES)
        affordable = wanted <= bytes_left - values.bytes
        kept = ("values" if is_whole else "sample") if affordable else "missing" if is_whole else "statistics"
        found: dict[str, Any] = {"kept": kept, "bytes": end - begin}
        if not is_whole or affordable:
            raw = _raw(unwrapped(live), begin, wanted)
            if affordable and wanted:
                values.tensors[f"storage.{number}"] = raw
            if not is_whole:
                found["statistics"] = statistics(raw, tensors[0].dtype)
        else:
            values.left_out += wanted
        kinds.append(found)
    values.kinds = tuple(kinds)
    return values


def _raw(tensor: Any, begin: int, count: int) -> Any:
    """Return bytes of a tensor's storage, on the CPU."""
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole.set_(tensor.untyped_storage(), begin, (count,), (1,))
        return whole.cpu().clone()


def statistics(raw: Any, dtype: str) -> dict[str, float]:
    """Return mean, standard deviation, least and largest of the finite values that bytes hold, and the share of zeros."""
    torch: Any = sys.modules["torch"]
    kind = getattr(torch, dtype)
    size = torch.empty(0, dtype=kind).element_size()
    floats = raw[: raw.numel() // size * size].view(kind).to(torch.float64)
    floats = floats[torch.isfinite(floats)]
    if floats.numel() == 0:
        return {"mean": 0.0, "std": 1.0, "least": -1.0, "largest": 1.0, "zeros": 0.0}
    zeros = float((floats == 0).double().mean())
    std = float(floats.std()) if floats.numel() > 1 else 0.0
    found = {"mean": float(floats.mean()), "std": std, "least": float(floats.min()), "largest": float(floats.max())}
    return {name: value if math.isfinite(value) else 0.0 for name, value in found.items()} | {"zeros": zeros}
