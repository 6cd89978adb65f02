"""Find Nsight Compute, run it, and parse the CSV pages of its report."""

import csv
import io
import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kerneltune.processes.programs import run_to_end

_PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/NVIDIA-Nsight-Compute*/ncu")
_SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "LaunchStats", "WarpStateStats", "SourceCounters")
_TIMEOUT_S = 600.0

DURATION = "gpu__time_duration.sum"
METRICS = {
    "DRAM % of peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 hit rate %": "lts__t_sector_hit_rate.pct",
    "shared bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "registers": "launch__registers_per_thread",
    "occupancy possible %": "sm__maximum_warps_per_active_cycle_pct",
    "occupancy reached %": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
"""Metric as `inspect` names it -> Nsight Compute's name of the metric."""

_LIMITS = re.compile(r"launch__occupancy_limit_(\w+)")
_STALLS = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)(?<!_not_issued)_per_issue_active\.ratio")
_TIME_US = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6}
_EXCESS = "L1 Wavefronts Shared Excessive"


@dataclass(frozen=True, slots=True)
class Profile:
    """Describe a profiled launch of a kernel.

    Attributes:
        time_us: time under the profiler in µs; not comparable with measured times.
        values: name in METRICS -> value; a metric that this GPU or version of ncu lacks is absent.
        limiter: the resource that limits resident programs per SM; several names if several resources limit equally.
        stalls: (reason, warps stalled for this reason per issued instruction), the largest first.
    """

    kernel: str
    time_us: float | None
    values: Mapping[str, float]
    limiter: str
    stalls: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class ConflictLine:
    """Hold the excess shared-memory wavefronts of a source line, or of an instruction without a line."""

    place: str
    source: str
    excess: float


class NcuReport(NamedTuple):
    """Hold the profiled launches in their order, and the places with conflicts in shared memory."""

    launches: list[Profile]
    conflicts: list[ConflictLine]


def find_ncu() -> Path | None:
    """Find ncu on PATH, else the newest ncu in the folders of NVIDIA's installers."""
    on_path = shutil.which("ncu")
    if on_path:
        return Path(on_path)
    programs = [path for place in _PLACES for path in Path("/").glob(place.lstrip("/")) if os.access(path, os.X_OK)]
    return max(programs, key=lambda path: [int(n) for n in re.findall(r"\d+", str(path))], default=None)


def profile(ncu: Path, command: Sequence[str], folder: Path) -> NcuReport:
    """Run `command` under ncu, at the GPU's present clocks and with cold caches.

    ncu profiles the launches between cudaProfilerStart and cudaProfilerStop, and writes its report into `folder`.
    """
    report = folder / "report.ncu-rep"
    flags = ["--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all", "--import-source", "yes"]
    flags += [flag for section in _SECTIONS for flag in ("--section", section)]
    flags += ["--metrics", ",".join([*METRICS.values(), DURATION]), "--force-overwrite"]
    log = _run([str(ncu), *flags, "-o", str(report), *command])
    if not report.is_file():
        raise ValueError(why_refused(log) or f"ncu made no report: {_last(log)}")
    page = [str(ncu), "--import", str(report), "--csv", "--page"]
    launches = parse_raw(_run([*page, "raw"]))
    if not launches:
        raise ValueError(f"ncu saw no kernel: {_last(log)}")
    return NcuReport(launches, parse_source(_run([*page, "source", "--print-source", "cuda,sass"])))


def why_refused(log: str) -> str:
    """Return the reason if ncu's output says that permission or support is missing; else an empty text."""
    if "ERR_NVGPUCTRPERM" in log:
        return (
            "ncu was refused: this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, give the container "
            "CAP_SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if "ERR_NVCMPGPU" in log or "not supported" in log.lower():
        return f"ncu does not support this GPU: {_last(log)}"
    return ""


def parse_raw(text: str) -> list[Profile]:
    """Parse the launches on a page `--page raw --csv`, which has a row of names, a row of units, and a row per launch."""
    rows = [row for row in csv.reader(io.StringIO(text)) if len(row) > 1]
    start = next((index for index, row in enumerate(rows) if row[0] == "ID"), None)
    if start is None or start + 1 >= len(rows):
        return []
    head, units = rows[start], rows[start + 1]
    return [
        _profile(dict(zip(head, row, strict=True)), dict(zip(head, units, strict=True)))
        for row in rows[start + 2 :]
        if len(row) == len(head) == len(units)
    ]


def parse_source(text: str) -> list[ConflictLine]:
    """Parse the lines of a page `--page source --csv` that have shared-memory conflicts.

    If no source line has a conflict, parse the page's instructions. The page has a table per kernel and file, each with a header.
    """
    lines: list[ConflictLine] = []
    instructions: list[ConflictLine] = []
    path, head = "", list[str]()
    for row in csv.reader(io.StringIO(text)):
        if len(row) > 1 and row[0] in ("Kernel Name", "Function Name", "File Path"):
            path, head = Path(row[1]).name if row[0] == "File Path" else "", []
        elif row and row[0] in ("Line No", "Address", "#"):
            head = row
        elif head and len(row) == len(head):
            cells = dict(reversed(list(zip(head, row, strict=True))))  # if two columns share a name, the first column counts
            number, address, source = (cells.get(name, "").strip() for name in ("Line No", "Address", "Source"))
            excess = _number(cells.get(_EXCESS, ""))
            if excess and number.isdigit():
                lines.append(ConflictLine(f"{path}:{number}", source, excess))
            elif excess and address.startswith("0x") and "Line No" not in head:
                instructions.append(ConflictLine(address, source, excess))
    return lines or instructions


def _profile(cells: Mapping[str, str], units: Mapping[str, str]) -> Profile:
    numbers = {name: value for name, text in cells.items() if (value := _number(text)) is not None}
    shown = {label: numbers[metric] for label, metric in METRICS.items() if metric in numbers}
    limits = {m[1]: value for name, value in numbers.items() if (m := _LIMITS.fullmatch(name))}
    tightest = sorted(name.replace("_", " ") for name, value in limits.items() if value == min(limits.values()))
    stalls = [(m[1], value) for name, value in numbers.items() if (m := _STALLS.fullmatch(name))]
    stalls = [(reason.replace("_", " "), value) for reason, value in stalls if reason != "selected"]
    duration = numbers.get(DURATION)
    time_us = None if duration is None else duration * _TIME_US.get(units.get(DURATION, ""), math.nan)
    ranked = tuple(sorted(stalls, key=lambda stall: -stall[1]))
    return Profile(cells.get("Kernel Name", ""), time_us, shown, ", ".join(tightest), ranked)


def _number(text: str) -> float | None:
    """Parse a number as ncu prints it, with commas between thousands; return None for any other text, such as `n/a` and `-`."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _run(command: Sequence[str]) -> str:
    """Run a command, and return its output and error streams in a single text."""
    output: str = run_to_end(command, timeout_s=_TIMEOUT_S, stderr=subprocess.STDOUT, text=True).stdout
    return output


def _last(log: str) -> str:
    """Return the last error that ncu names, else the last line that is not blank."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("==ERROR==")]
    return (errors or lines or ["it said nothing"])[-1]
