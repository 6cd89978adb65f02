"""Adopt flash-linear-attention's GLA layer and print the table of docs/tune_any_program.md.

`python table.py --work DIR --json FILE` captures, tunes and serves the layer in fresh processes on this GPU and writes what it
found; `python table.py --from FILE` prints the table of a file.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROGRAM = [sys.executable, str(HERE / "gla_layer.py")]
KERNELTUNE = [sys.executable, "-m", "kerneltune"]


def run(command: list[str], **environment: str) -> tuple[str, float]:
    """Return the output and the seconds of a command; it is shown where it fails."""
    began = time.perf_counter()
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(" ".join(command), done.stdout[-2000:], done.stderr[-3000:], sep="\n")
    return done.stdout, time.perf_counter() - began


def last_json(output: str) -> dict[str, Any]:
    """Return the last line that is JSON."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def measure(work: Path, target: Path, stock: bool) -> None:
    """Capture, tune and serve; the file is written anew after every step."""
    cache = {"TRITON_CACHE_DIR": str(work / "triton")}
    found: dict[str, Any] = {"rows": [], "commit": os.environ.get("KERNELTUNE_COMMIT", "")}

    def add(output: str, seconds: float, **more: Any) -> None:
        found["rows"].append({**last_json(output), "wall_s": round(seconds, 1), **more})
        target.write_text(json.dumps(found, indent=1) + "\n")

    capture = str(work / "capture")
    serve = [*KERNELTUNE, "serve", "--configs", capture, "--", *PROGRAM]
    expected = str(work / "captured.pt")
    add(*run([*KERNELTUNE, "capture", "--out", capture, "--", *PROGRAM, "captured", expected], **cache))
    output, seconds = run([*KERNELTUNE, "tune", capture], **cache)
    served = next((Path(capture) / "served").glob("nvidia*.json"), None)
    found["table"] = json.loads(served.read_text()) if served else None
    add(output, seconds, what="tune", last_line=output.splitlines()[-1] if output else "")
    add(*run([*serve, "served, Triton's cache empty", str(work / "1.pt"), expected], TRITON_CACHE_DIR=str(work / "empty")))
    for number in (2, 3):
        add(*run([*serve, f"served, process {number}", str(work / f"{number}.pt"), expected], **cache))
    if stock:
        add(*run([*PROGRAM, "triton.autotune, compiled kernels cached", str(work / "4.pt"), expected], **cache))


def table(found: dict[str, Any]) -> str:
    """Return the table as Markdown."""
    lines = [
        "| process | s in all | importing | in the autotuner | of it compiling, launching | tunings | step ms | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        if row["what"] == "tune":
            lines.append(f"| tune, offline: {row['last_line'].split(';')[0]} | {row['wall_s']} | | | | | | |")
            continue
        numbers = [row.get(name) for name in ("process_s", "import_s", "autotuner_s", "of_it_compiling_and_launching_s")]
        shown = [f"{value:.2f}" if value is not None else "" for value in numbers]
        tunings = "" if row.get("serving") is None else str(row["serving"]["tunings"])
        difference = "" if row.get("largest_difference") is None else f"{row['largest_difference']:.1e}"
        step = f"{row['step_gpu_ms']:.2f}" if "step_gpu_ms" in row else ""
        lines.append(f"| {row['what']} | {' | '.join(shown)} | {tunings} | {step} | {difference} |")
    known = [row["configs"] for row in found["rows"] if row["what"].startswith("served") and "configs" in row]
    same = {json.dumps(configs, sort_keys=True) for configs in known}
    if len(known) > 1:
        verdict = "the same" if len(same) == 1 else f"{len(same)} different sets"
        lines += ["", f"Configs of {len(known)} served processes: {verdict}"]
    return "\n".join([*lines, "", *kernels(found.get("table"))])


def kernels(served: dict[str, Any] | None) -> list[str]:
    """Return the table of kernels: the author's choice against ours."""
    lines = ["| kernel | author µs | ours µs | speedup | 95 % |", "|---|---|---|---|---|"]
    for kernel in served["kernels"] if served else ():
        for row in (row for group in kernel["groups"] for row in group["rows"]):
            evidence = row["evidence"]
            author, ours, over = evidence.get("default_us"), evidence.get("time_us"), evidence.get("over_default") or [1.0, 1.0]
            if author and ours:
                interval = f"{over[0]:.3f}-{over[1]:.3f}"
                lines.append(f"| {kernel['name']} | {author:.1f} | {ours:.1f} | {author / ours:.3f}x | {interval} |")
    return lines


def main() -> None:
    """Measure or print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("adopted"))
    parser.add_argument("--json", type=Path, default=Path("adopted.json"))
    parser.add_argument("--stock", action="store_true", help="also run triton.autotune with compiled kernels cached; a minute")
    parser.add_argument("--from", dest="source", type=Path)
    options = parser.parse_args()
    if options.source is None:
        options.work.mkdir(parents=True, exist_ok=True)
        measure(options.work.resolve(), options.json, options.stock)
    print(table(json.loads((options.source or options.json).read_text())))


if __name__ == "__main__":
    main()
