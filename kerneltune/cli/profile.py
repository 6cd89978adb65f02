"""`kerneltune profile`: show two variants or configs of a case side by side under Nsight Compute, on the GPU."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated

import msgspec

from kerneltune import device
from kerneltune.cli import loading
from kerneltune.cli import options as o
from kerneltune.cli.console import note, show, show_table
from kerneltune.cli.files import bench_case
from kerneltune.inspection.ncu import METRICS, NcuReport, Profile, find_ncu, profile
from kerneltune.spec import Case
from kerneltune.task import Task

_STALLS = 5
_LINES = 8


def command(
    op: o.OpName,
    a: Annotated[str, o.argument("A", "A variant or peer.")],
    b: Annotated[str, o.argument("B", "A second variant or peer, or A again with --config-b.")],
    case: Annotated[str | None, o.option("--case", "NAME", "A case of a sweep, the first if not given.")] = None,
    dtype: o.Dtype = None,
    quant: o.Quant = None,
    config_a: Annotated[str | None, o.option("--config-a", "JSON", "A's config, else the cached or default one.")] = None,
    config_b: Annotated[str | None, o.option("--config-b", "JSON", "B's config, else the cached or default one.")] = None,
) -> None:
    """Show DRAM throughput, L2 hits, bank conflicts, occupancy and stalls of A beside B. Needs a GPU and ncu.

    Clocks are left as they are and caches start cold. The profiler distorts times: compare times with `compare`.
    """
    operator = loading.load_op(op)
    for field, text, name in (("config-a", config_a, a), ("config-b", config_b, b)):
        o.one_of("variant", name, [variant.name for variant in operator.variants])
        if text:
            o.config_from_json(operator.variant(name), field, text)
    profiled_case = bench_case(operator, case, dtype, quant)
    for variant in (operator.variant(a), operator.variant(b)):
        if variant.missing():
            raise ValueError(f"{variant.name} needs {', '.join(variant.missing())}, which is not installed")
        unsupported = variant.unsupported(profiled_case)
        if unsupported:
            raise ValueError(f"{variant.name} does not support {profiled_case.name}: {unsupported}")
    import torch

    if not device.current().is_gpu or torch.version.hip is not None:
        raise ValueError("profile needs an NVIDIA GPU; `inspect` shows registers, spills and occupancy without a GPU")
    ncu = find_ncu()
    if ncu is None:
        raise ValueError("profile needs Nsight Compute: no ncu on PATH, under /usr/local/cuda*/bin or /opt/nvidia")
    reports = []
    for name, text in ((a, config_a), (b, config_b)):
        note(f"profiling {name}")
        reports.append(_profiled(ncu, [o.captured(), op, name, msgspec.json.encode(profiled_case).decode(), text or ""]))
    show(f"{op}: {profiled_case.name} {profiled_case.label}")
    _show(reports, (a, b))


def launch_profiled(captured: str, op: str, variant: str, case: str, config: str) -> None:
    """Launch a variant once between cudaProfilerStart and cudaProfilerStop, after a launch that compiles it.

    captured: folder of the capture in use; empty for none.
    """
    import torch

    ops = loading.load_ops(captured)
    profiled = ops[op].variant(variant)
    shape = msgspec.json.decode(case, type=Case)
    knobs = o.config_from_json(profiled, "config", config) if config else Task(ops[op], shape, profiled).config_of_call()
    inputs = ops[op].inputs(shape, device="cuda")
    profiled.run(inputs, knobs)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    profiled.run(inputs, knobs)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _profiled(ncu: Path, arguments: Sequence[str]) -> NcuReport:
    code = "import sys; from kerneltune.cli.profile import launch_profiled; launch_profiled(*sys.argv[1:])"
    with tempfile.TemporaryDirectory(prefix="kerneltune-") as folder:
        return profile(ncu, [sys.executable, "-c", code, *arguments], Path(folder))


def _show(reports: Sequence[NcuReport], names: tuple[str, str]) -> None:
    """Print the kernels of two reports side by side, in the order of their launches, then the lines with bank conflicts."""
    for pair in zip_longest(*(report.launches for report in reports)):
        show(" | ".join(profile.kernel if profile else "-" for profile in pair))
        show_table(("", f"A {names[0]}", f"B {names[1]}"), _rows(pair))
    for side, name, report in zip("AB", names, reports, strict=True):
        worst = sorted(report.conflicts, key=lambda line: -line.excess)[:_LINES]
        show(f"{side} {name}: " + ("lines with bank conflicts" if worst else "no line has bank conflicts"))
        if worst:
            show_table(("place", "excess", "source"), [(line.place, f"{line.excess:,.0f}", line.source) for line in worst])


def _rows(pair: Sequence[Profile | None]) -> Iterator[tuple[str, ...]]:
    yield "time under ncu µs", *(f"{p.time_us:.1f}" if p and p.time_us is not None else "-" for p in pair)
    for label in METRICS:
        yield label, *(f"{p.values[label]:,.1f}".removesuffix(".0") if p and label in p.values else "-" for p in pair)
    yield "occupancy limited by", *(p.limiter or "-" if p else "-" for p in pair)
    for rank in range(_STALLS):
        stalls = [p.stalls[rank] if p and rank < len(p.stalls) else None for p in pair]
        if any(stalls):
            yield f"stall {rank + 1}", *(f"{stall[0]} {stall[1]:.2f}" if stall else "-" for stall in stalls)
