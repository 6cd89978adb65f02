"""Capture, tune and serve the kernels of a program, with and without an autotuner, and print their table.

`python plain_table.py --work DIR --json FILE` needs a GPU and liger-kernel; `--program` names another program and its package.
`--autotune` captures under the authors' own tuning, so that gains are over the authors' choices. `--workers N` compile, and
tuning begins no further class after `--budget` seconds.
`python plain_table.py --from FILE` prints the table of a file.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("liger_plain.py", "torchao_plain.py", "unsloth_plain.py", "vllm_mamba.py")
KERNELTUNE = [sys.executable, "-m", "kerneltune"]
GAINED = 1.01
"""Speedup of the least class that counts as a gain; its interval must lie above 1 as well."""
MARGIN = 1.03
"""Speedup that `kerneltune gate` tells from noise by default."""


def run(command: list[str], cache: Path) -> dict[str, Any]:
    """Run a command; returns its seconds, its last lines, and its last line of JSON."""
    began = time.perf_counter()
    done = subprocess.run(command, env=os.environ | {"TRITON_CACHE_DIR": str(cache)}, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    said = next((json.loads(line) for line in reversed(lines) if line.startswith("{")), None)
    tail = [*lines[-3:], *done.stderr.splitlines()[-12:]]
    return {"seconds": round(time.perf_counter() - began, 1), "exit": done.returncode, "result": said, "tail": tail}


def measure(name: str, work: Path, target: Path, flags: list[str], tune: list[str]) -> None:
    """Capture a program with flags, tune and serve it; the file is written anew after every step."""
    program = [sys.executable, str(Path(__file__).resolve().with_name(name))]
    capture, cache, expected = work / "capture", work / "triton", str(work / "program.pt")
    found: dict[str, Any] = {}
    steps = {
        "capture": [*KERNELTUNE, "capture", "--plain", *flags, "--out", str(capture), "--", *program, expected],
        "again": [*program, str(work / "again.pt"), expected],
        "tune": [*KERNELTUNE, "tune", str(capture), *tune],
        "serve": [*KERNELTUNE, "serve", "--configs", str(capture), "--", *program, str(work / "served.pt"), expected],
    }
    for name, command in steps.items():
        found[name] = run(command, cache)
        found["rows"] = rows(capture)
        blocks = capture / "blocks.json"
        found["blocks"] = json.loads(blocks.read_text())["classes"] if blocks.is_file() else {}
        target.write_text(json.dumps(found, indent=1) + "\n")


def rows(capture: Path) -> list[dict[str, Any]]:
    """Return a row for each class of a tuned capture: kernel, size, times, interval, the program's options and ours."""
    table = next(capture.glob("served/nvidia*.json"), None)
    if table is None:
        return []
    found = []
    for kernel in json.loads(table.read_text())["kernels"]:
        for row in (row for group in kernel["groups"] for row in group["rows"]):
            stored = json.loads((capture / "classes" / row["evidence"]["class"] / "class.json").read_text())
            tensor = next(one["tensor"] for one in stored["arguments"] if one["tensor"])
            evidence = {name: row["evidence"].get(name) for name in ("default_us", "time_us", "gain", "over_default")}
            found.append({
                "kernel": kernel["name"], "shape": tensor["shape"],
                "program": stored["choice"] or stored["candidates"][0]["config"],
                "config": row["configs"][0], **evidence,
            })  # fmt: skip
    return found


def options(config: dict[str, Any]) -> str:
    """Return the options of a config in few words."""
    named = {**config["kwargs"], "warps": config["num_warps"], "stages": config["num_stages"]}
    return " ".join(f"{name}={value}" for name, value in named.items())


def gain(row: dict[str, Any]) -> float:
    """Return the speedup of a row; 1 where the program's config stays."""
    is_changed = row["config"] != row["program"] and row["default_us"] and row["time_us"]
    return float(row.get("gain") or row["default_us"] / row["time_us"]) if is_changed else 1.0


def table(found: dict[str, Any]) -> str:
    """Return the table as Markdown: a line for each kernel and shape, then what gained."""
    lines = [
        "| kernel | first tensor | program's µs | ours µs | speedup | 95 % | program's options | ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ordered = sorted(found["rows"], key=lambda row: (row["kernel"], row["shape"]))
    for row in ordered:
        low, high = row["over_default"] or (1.0, 1.0)
        times = [f"{row[name]:.1f}" if row[name] else "-" for name in ("default_us", "time_us")]
        shape, both = "x".join(map(str, row["shape"])), f"{options(row['program'])} | {options(row['config'])}"
        lines.append(f"| {row['kernel']} | {shape} | {' | '.join(times)} | {gain(row):.3f}x | {low:.3f}-{high:.3f} | {both} |")
    gains: dict[str, list[float]] = {}
    for row in ordered:
        gains.setdefault(row["kernel"], []).append(gain(row))
    coarse = {kernel: values for kernel, values in gains.items() if max(values) >= GAINED}
    lines += ["", f"{len(ordered)} classes of {len(gains)} kernels; {len(coarse)} kernels gain:"]
    lines += [f"- {kernel}: {mean(values):.3f}x (geometric mean of {len(values)})" for kernel, values in coarse.items()]
    if coarse:
        lines.append(f"- all of these together: {mean([value for values in coarse.values() for value in values]):.3f}x")
    for least, words in ((1.0, "gain"), (MARGIN, "gain 3 % or more")):
        faster = [gain(row) for row in ordered if gain(row) > 1.0 and gain(row) >= least]
        if faster:
            lines.append(f"{len(faster)} of {len(ordered)} classes {words}: {mean(faster):.3f}x")
    lines.append(f"Nothing to gain: {', '.join(sorted(set(gains) - set(coarse))) or 'none'}.")
    return "\n".join(lines)


def mean(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    """Measure or print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("plain"))
    parser.add_argument("--json", type=Path, default=Path("plain.json"))
    parser.add_argument("--program", choices=PROGRAMS, default=PROGRAMS[0])
    parser.add_argument("--autotune", action="store_true")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--budget", type=float)
    parser.add_argument("--from", dest="source", type=Path)
    given = parser.parse_args()
    if given.source is None:
        given.work.mkdir(parents=True, exist_ok=True)
        tune = [
            ["--workers", str(given.workers)] if given.workers else [],
            ["--budget", str(given.budget)] if given.budget else [],
        ]
        flags = ["--autotune"] if given.autotune else []
        measure(given.program, given.work.resolve(), given.json, flags, [word for words in tune for word in words])
    print(table(json.loads((given.source or given.json).read_text())))


if __name__ == "__main__":
    main()
