"""Values of a launch's memory, as far as a capture keeps them: indices as they are, samples and statistics of data."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kerneltune.adopt.arguments import Argument, Storages, Tensor, span

SAMPLE_BYTES = 1 << 20
"""Most bytes that are kept of data: of floats, of bytes, of whole numbers that are no indices."""
_STATISTICS_BYTES = 1 << 16
_LARGEST_INDEX, _LEAST_INDEX = 1 << 30, -(1 << 16)
"""Whole numbers beyond are packed data, as 4-bit weights in 32 bits are."""


@dataclass(slots=True)
class Values:
    """Memory of a launch, as far as it is kept.

    Attributes:
        tensors: bytes of each storage by name `storage.N`, on the CPU.
        kinds: for every storage its bytes, the kind of values that are kept, and statistics.
        left_out: bytes of whole numbers that the budget did not allow.
        sampled: bytes of samples of data.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[dict[str, Any], ...] = ()
    left_out: int = 0
    sampled: int = 0

    @property
    def bytes(self) -> int:
        """Return bytes that are kept."""
        return sum(int(tensor.numel()) for tensor in self.tensors.values())

    @classmethod
    def missing(cls, count: int) -> "Values":
        """Return the values of a launch whose memory may not be read: none."""
        return cls(kinds=tuple({"kept": "missing"} for _ in range(count)))


def collect(arguments: Sequence[Argument], storages: Storages, bytes_left: int, sample_bytes_left: int) -> Values:
    """Copy values of a launch's memory, before the launch changes them. Waits for the GPU.

    Indices are kept before samples of data: without its indices a launch cannot be made again.

    Args:
        arguments: of the launch.
        storages: of the launch's tensors.
        bytes_left: bytes that may still be kept.
        sample_bytes_left: bytes of them that may be samples of data.
    """
    values = Values()
    kinds: dict[int, dict[str, Any]] = {}
    data: list[tuple[int, Any, int, int, Tensor]] = []
    for number, live in enumerate(storages.live.values()):
        tensors = [a.tensor for a in arguments if a.tensor is not None and a.tensor.storage == number]
        begin, end = span(tensors)
        if not _are_indices(live, begin, end, tensors):
            data.append((number, live, begin, end, tensors[0]))
            continue
        is_affordable = end - begin <= bytes_left - values.bytes
        kinds[number] = {"kept": "values" if is_affordable else "missing", "bytes": end - begin}
        if is_affordable and end > begin:
            values.tensors[f"storage.{number}"] = _raw(live, begin, end - begin)
        elif not is_affordable:
            values.left_out += end - begin
    sampled = 0
    for number, live, begin, end, tensor in data:
        wanted = min(end - begin, SAMPLE_BYTES)
        is_affordable = wanted <= min(bytes_left - values.bytes, sample_bytes_left - sampled)
        raw = _raw(live, begin, wanted if is_affordable else min(wanted, _STATISTICS_BYTES))
        kinds[number] = {"kept": "sample" if is_affordable else "statistics", "bytes": end - begin}
        kinds[number]["statistics"] = statistics(raw[:_STATISTICS_BYTES], tensor.dtype)
        if is_affordable and wanted:
            values.tensors[f"storage.{number}"] = raw
            sampled += wanted
    values.sampled = sampled
    values.kinds = tuple(kinds[number] for number in range(len(kinds)))
    return values


def _are_indices(live: Any, begin: int, end: int, tensors: Sequence[Tensor]) -> bool:
    """Return whether a storage holds whole numbers that a kernel may read as indices, so that all of them must be kept.

    Few bytes are kept in any case. Many bytes of 8-bit whole numbers are weights.
    """
    whole = [tensor for tensor in tensors if tensor.is_whole]
    if not whole or end - begin <= SAMPLE_BYTES:
        return bool(whole)
    if all(tensor.element_bytes == 1 for tensor in whole):
        return False
    kind, size = whole[0].dtype, whole[0].element_bytes
    torch: Any = sys.modules["torch"]
    try:
        with torch.no_grad():
            numbers = torch.empty(0, dtype=getattr(torch, kind), device=live.device)
            numbers.set_(live.untyped_storage(), begin // size, ((end - begin) // size,), (1,))
            least, largest = (int(value) for value in numbers.aminmax())
    except RuntimeError:  # an element type without an order here
        return True
    return least >= _LEAST_INDEX and largest < _LARGEST_INDEX


_LEAST_ADDRESS, _LARGEST_ADDRESS = 1 << 32, 1 << 48
"""Bounds of addresses: above any index, and the end of the memory that a process can address."""


def holds_addresses(arguments: Sequence[Argument], values: Values) -> str:
    """Return the first argument with 64-bit whole numbers that are all addresses or 0, empty for none."""
    torch: Any = sys.modules["torch"]
    for argument in arguments:
        tensor = argument.tensor
        raw = values.tensors.get(f"storage.{tensor.storage}") if tensor is not None and tensor.is_whole else None
        if raw is not None and tensor is not None and tensor.element_bytes == 8 and raw.numel() % 8 == 0:
            whole = raw.view(torch.int64)
            whole = whole[whole != 0]
            if whole.numel() and bool(((whole >= _LEAST_ADDRESS) & (whole < _LARGEST_ADDRESS)).all()):
                return argument.name
    return ""


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
