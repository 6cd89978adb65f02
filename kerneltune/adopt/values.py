"""Keep bytes of the memory of a launch: all bytes of indices, samples and statistics of other data. Find addresses in them."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kerneltune.adopt.arguments import Argument, Kept, KeptValues, Statistics, TensorLayout, is_integer, span, views
from kerneltune.adopt.bytecode import functions_of

SAMPLE_BYTES = 1 << 20
"""Most bytes that are kept of a storage of data: of floats, of bytes, of integers that are no indices."""
_STATISTICS_BYTES = 1 << 16
_MOST_BEHIND, _MOST_PARTS = 1 << 26, 64
"""Most bytes of the program's buffer behind the arguments that a replay makes, and most times the bytes of the arguments."""
_LARGEST_INDEX, _LEAST_INDEX = 1 << 30, -(1 << 16)
"""Integers beyond these bounds are packed data, such as 4-bit weights in 32 bits, or memory that nobody has filled."""
_SMALL_INDEX, _LEAST_SHARE = 1 << 20, 1 / 256
"""Bound below which integers look like indices, and the least part of them in a table: random bits have one in 4096."""
_LEAST_ADDRESS, _LARGEST_ADDRESS = 1 << 32, 1 << 48
"""Bounds of addresses: above any index, and the end of the memory that a process can address."""


@dataclass(slots=True)
class Values:
    """Hold the memory of a launch that a capture keeps.

    Attributes:
        tensors: bytes of each storage by name `storage.N`, on the CPU.
        kept: a description for each storage.
        left_out: bytes of integers that the budget did not allow.
        sampled: bytes of samples of data.
    """

    tensors: dict[str, Any] = field(default_factory=dict)
    kept: tuple[KeptValues, ...] = ()
    left_out: int = 0
    sampled: int = 0

    @property
    def bytes(self) -> int:
        """Return bytes that are kept."""
        return sum(int(tensor.numel()) for tensor in self.tensors.values())


def collect(arguments: Sequence[Argument], storages: Sequence[Any], bytes_left: int, sample_bytes_left: int) -> Values:
    """Copy values of a launch's memory, before the launch changes them. Waits for the GPU.

    Indices are kept before samples of data: without its indices a launch cannot be made again.

    Args:
        arguments: arguments of the launch.
        storages: a live tensor of each storage.
        bytes_left, sample_bytes_left: bytes that may still be kept, and bytes of them that may be samples of data.
    """
    values = Values()
    kept: dict[int, KeptValues] = {}
    tensors_of = [views(arguments, number) for number in range(len(storages))]
    shares = list(map(_share_of_indices, storages, tensors_of))
    for number in sorted(range(len(storages)), key=lambda number: -shares[number]):
        live, (begin, end) = storages[number], span(tensors_of[number])
        size, left = end - begin, bytes_left - values.bytes
        kind, length = _kept_part(shares[number], size, left, min(left, sample_bytes_left - values.sampled))
        raw = _elements(live, "uint8", begin, length).cpu().clone()
        is_data = kind in ("sample", "statistics")
        measured = statistics(raw[:_STATISTICS_BYTES], tensors_of[number][0].dtype) if is_data else None
        if length and kind != "statistics":
            values.tensors[f"storage.{number}"] = raw
        values.sampled += length if kind == "sample" else 0
        values.left_out += size if kind == "missing" else 0
        # a kernel may read all of a buffer of which it gets the first part, as vLLM's adapters do
        behind = int(live.untyped_storage().nbytes()) - end
        has_behind = 0 < behind <= min(_MOST_BEHIND, _MOST_PARTS * size)
        kept[number] = KeptValues(kind, size, measured, behind if has_behind else 0)
    values.kept = tuple(kept[number] for number in range(len(kept)))
    return values


def _kept_part(share: float, size: int, left: int, sample_left: int) -> tuple[Kept, int]:
    """Return what is kept of a storage with a share of indices, and the bytes to read: data are sampled, else measured."""
    if share and size <= left:
        return "values", size
    if share == 1.0:
        return "missing", 0
    sample = min(size, SAMPLE_BYTES)
    return ("sample", sample) if sample <= sample_left else ("statistics", min(size, _STATISTICS_BYTES))


class Effect:
    """Learn whether a launch changes the first bytes of its storages, without waiting for the GPU."""

    def __init__(self, arguments: Sequence[Argument], storages: Sequence[Any]) -> None:
        """Copy the bytes before a launch."""
        spans = [span(views(arguments, number)) for number in range(len(storages))]
        lengths = [min(end - begin, SAMPLE_BYTES) for begin, end in spans]
        parts = zip(storages, spans, lengths, strict=True)
        self._bytes = [_elements(live, "uint8", begin, length) for live, (begin, _), length in parts]
        self._before = [part.clone() for part in self._bytes]
        self._changed: list[Any] = []
        self._event: Any = None

    def end(self) -> None:
        """Compare the bytes behind the launch."""
        has_gpu = any(part.is_cuda for part in self._bytes)
        changed = [(now != before).any() for now, before in zip(self._bytes, self._before, strict=True)]
        # to memory of the host on the stream: to read a tensor of the GPU waits for all that the program has launched since
        self._changed = [flag.to("cpu", non_blocking=True) for flag in changed]
        self._bytes = self._before = []
        if has_gpu:
            self._event = sys.modules["torch"].cuda.Event(enable_timing=False)
            self._event.record()

    def is_known(self, wait: bool = False) -> bool:
        """Return whether the bytes have been compared; `wait` waits for the GPU."""
        if wait and self._event is not None:
            self._event.synchronize()
        return self._event is None or bool(self._event.query())

    @property
    def is_seen(self) -> bool:
        """Return whether a byte has changed."""
        return any(map(bool, self._changed))


def _share_of_indices(live: Any, tensors: Sequence[TensorLayout]) -> float:
    """Return the part of a storage that a kernel may read as indices: 1.0 if all of it must be kept, 0.0 for data.

    Few bytes are kept in any case. Many bytes of 8-bit integers are weights. A table that the program has filled in part holds
    any bits in the rest.
    """
    integers, (begin, end) = [tensor for tensor in tensors if tensor.holds_integers], span(tensors)
    if not integers or end - begin <= SAMPLE_BYTES:
        return float(bool(integers))
    if all(tensor.element_bytes == 1 for tensor in integers):
        return 0.0
    kind, size = integers[0].dtype, integers[0].element_bytes
    elements = _elements(live, kind, begin // size, (end - begin) // size)
    try:
        least, largest = (int(value) for value in elements.aminmax())
    except RuntimeError:  # an element type without an order here
        return 1.0
    if least >= _LEAST_INDEX and largest < _LARGEST_INDEX:
        return 1.0
    share = int(((elements >= -1) & (elements < _SMALL_INDEX)).sum()) / elements.numel()
    return share if share >= _LEAST_SHARE else 0.0


def _elements(tensor: Any, dtype: str, begin: int, count: int) -> Any:
    """Return elements of a tensor's storage, (count,) dtype."""
    torch: Any = sys.modules["torch"]
    with torch.no_grad():
        elements = torch.empty(0, dtype=getattr(torch, dtype), device=tensor.device)
        return elements.set_(tensor.untyped_storage(), begin, (count,), (1,))


def statistics(raw: Any, dtype: str) -> Statistics:
    """Return the statistics of the values that bytes hold."""
    torch: Any = sys.modules["torch"]
    kind = getattr(torch, dtype)
    floats = raw[: raw.numel() // kind.itemsize * kind.itemsize].view(kind).to(torch.float64)
    floats = floats[torch.isfinite(floats)]
    if floats.numel() == 0:
        return Statistics()
    std = float(floats.std()) if floats.numel() > 1 else 0.0
    measured = (float(floats.mean()), std, float(floats.min()), float(floats.max()))
    return Statistics(*(value if math.isfinite(value) else 0.0 for value in measured))


def holds_addresses(function: Any, arguments: Sequence[Argument], values: Values) -> str:
    """Return the first argument of a kernel's function that is an address or holds addresses, empty for none.

    A kernel that reads addresses faults in another process. A number between the bounds of addresses is an address if the kernel
    makes pointers of integers, or if torch has allocated its place on a GPU. New memory of the host may hold addresses that no
    kernel reads.
    """
    torch: Any = sys.modules["torch"]
    for argument in arguments:
        numbers, tensor = _addresses(argument.value), argument.tensor
        if tensor is not None and tensor.holds_integers and tensor.element_bytes == 8:
            raw = values.tensors.get(f"storage.{tensor.storage}")
            if raw is None:  # a large table of which not even a sample is kept
                measured = values.kept[tensor.storage].statistics
                numbers = _addresses(int(measured.largest)) if measured else []
            elif raw.numel() % 8 == 0:
                integers = raw.view(torch.int64)
                numbers = integers[(integers >= _LEAST_ADDRESS) & (integers < _LARGEST_ADDRESS)][:1].tolist()
        if any(_makes_pointers(function) or _is_allocated(number) for number in numbers):
            return argument.name
    return ""


def _addresses(value: Any) -> list[int]:
    """Return the integers in the JSON of a value that may be addresses."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in _addresses(item)]
    return [value] if is_integer(value) and _LEAST_ADDRESS <= value < _LARGEST_ADDRESS else []


def _is_allocated(address: int) -> bool:
    """Return whether torch has allocated the memory at an address of a GPU. A large process takes milliseconds to answer."""
    cuda: Any = sys.modules["torch"].cuda
    segments = cuda.memory_snapshot() if cuda.is_initialized() else ()
    return any(segment["address"] <= address < segment["address"] + segment["total_size"] for segment in segments)


@cache
def _makes_pointers(function: Any) -> bool:
    """Return whether a kernel or a helper of it may make pointers of integers, by `pointer_type` or by inline assembly."""
    named = [(reached.__globals__, name) for reached in functions_of(function) for name in reached.__code__.co_names]
    makers = ("pointer_type", "inline_asm_elementwise")
    return any(name in makers or type(held.get(name)).__name__ in makers for held, name in named)
