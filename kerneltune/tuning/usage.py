"""How busy the GPU was during searches, and the file that says so for every tuning run.

Measures nothing itself. Imports the standard library and files.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kerneltune.files import append_text


@dataclass(frozen=True, slots=True)
class Usage:
    """Of one search, or of all searches of a run.

    Attributes:
        wall_s: from the first compiled config to the end.
        busy_s: of that, spent by the measuring processes, all together, on inputs, checks and samples.
        evaluations: configs tried that were not known before.
        gpus: that took part.
    """

    wall_s: float
    busy_s: float
    evaluations: int
    gpus: int = 1

    @property
    def idle(self) -> float:
        """The share of the time in which a GPU waited."""
        return max(0.0, 1.0 - self.busy_s / (self.gpus * self.wall_s)) if self.wall_s > 0 else 0.0

    @property
    def text(self) -> str:
        """One line."""
        who = "GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        share = f"{100 * self.idle:.0f} % of {self.wall_s:.1f} s"
        return f"{who} idle for {share} after the first compiled config, {self.evaluations} evaluations"


def keep(path: Path, whole: Usage, searches: Sequence[tuple[Mapping[str, Any], Usage]], **more: str) -> None:
    """Add a run to a file, one JSON line each: the run as a whole, and every search with what it was of.

    Raises:
        ValueError: the file cannot be written.
    """
    rows = [{**identity, **_values(usage)} for identity, usage in searches]
    row = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **more, **_values(whole), "searches": rows}
    append_text(path, json.dumps(row) + "\n")


def _values(usage: Usage) -> dict[str, float]:
    return {name: round(value, 3) for name, value in (asdict(usage) | {"idle": usage.idle}).items()}
