"""Compare steps of foreign programs under their authors' autotuners with the same steps served; prints a table.

`python step_table.py --work DIR --json FILE gla blockwise cast experts` captures and tunes each program of steps.py, then runs it
with the compiled kernels of all configs in Triton's cache: once unchanged, so that the author's tuning chooses, and once served.
`--from FILE…` prints tables of files.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from plain_table import KERNELTUNE, run
from steps import PROGRAMS

from kerneltune.stats import ratio_interval

STEPS = Path(__file__).resolve().with_name("steps.py")


def measure(name: str, work: Path, target: Path, tune: list[str]) -> None:
    """Capture, tune, run and serve one program; the file is written anew after every step."""
    program, capture, cache = [sys.executable, str(STEPS), name], work / name, work / "triton"
    found: dict[str, Any] = {"program": name}
    commands = {
        "capture": [*KERNELTUNE, "capture", "--out", str(capture), "--", *program],
        "tune": [*KERNELTUNE, "tune", str(capture), *tune],
        "author": program,
        "served": [*KERNELTUNE, "serve", "--configs", str(capture), "--", *program],
    }
    for step, command in commands.items():
        found[step] = run(command, cache)
        target.write_text(json.dumps(found, indent=1) + "\n")


def table(files: list[Path]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| program | size | author's GPU ms | served | author's / served, 95 % | its host ms | served | the same | s in all |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for found in map(json.loads, (path.read_text() for path in files)):
        author, served = (found.get(name, {}).get("result") for name in ("author", "served"))
        for size in author["sizes"] if author and served else ():
            one, other = author["sizes"][size], served["sizes"][size]
            intervals = [ratio_interval(np.array(one[kind]), np.array(other[kind])) for kind in ("gpu_ms", "host_ms")]
            gpu, host = (f"{over.median:.3f}x ({over.low:.3f}-{over.high:.3f})" for over in intervals)
            medians = [f"{np.median(side[kind]):.3f}" for kind in ("gpu_ms", "host_ms") for side in (one, other)]
            seconds = f"{author['seconds']:.1f}, {served['seconds']:.1f}"
            cells = (found["program"], size, *medians[:2], gpu, *medians[2:], host, seconds)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure or print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="*", choices=[*PROGRAMS, []])
    parser.add_argument("--work", type=Path, default=Path("steps"))
    parser.add_argument("--json", type=Path, default=Path("steps.json"), help="a file for each program: NAME-FILE")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--from", dest="sources", type=Path, nargs="+")
    given = parser.parse_args()
    files = given.sources or [given.json.with_name(f"{name}-{given.json.name}") for name in given.programs]
    if not given.sources:
        given.work.mkdir(parents=True, exist_ok=True)
        tune = ["--workers", str(given.workers)] if given.workers else []
        for name, path in zip(given.programs, files, strict=True):
            measure(name, given.work.resolve(), path, tune)
    print(table(files))


if __name__ == "__main__":
    main()
