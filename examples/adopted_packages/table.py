"""Adopt flash-linear-attention's GLA layer and print the tables of docs/notes/adoption.md.

`python table.py --work DIR --json FILE` captures, tunes and serves the layer in fresh processes on this GPU and writes their
figures; with `--sizes` it also tunes kernels at sizes that their authors' keys leave out. `python table.py --from FILE` prints
the tables of a file.
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

HERE = Path(__file__).resolve().parent
PROGRAM = [sys.executable, str(HERE / "gla_layer.py")]
OMITTED = [sys.executable, str(HERE / "omitted_sizes.py")]
EMPTY, WARM = 2, 3
"""Served processes with an empty Triton cache, and with the compiled kernels in it."""
GAINED = 1.03
KERNELTUNE = [sys.executable, "-m", "kerneltune"]


def run(command: list[str], **environment: str) -> tuple[str, float]:
    """Return the output and the seconds of a command; show the output of a command that fails."""
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
    for number in range(1, EMPTY + 1):
        results, empty = str(work / f"empty{number}.pt"), {"TRITON_CACHE_DIR": str(work / f"empty{number}")}
        add(*run([*serve, f"served, Triton's cache empty, process {number}", results, expected], **empty))
    for number in range(1, WARM + 1):
        add(*run([*serve, f"served, process {number}", str(work / f"{number}.pt"), expected], **cache))
    if stock:
        add(*run([*PROGRAM, "triton.autotune, compiled kernels cached", str(work / "4.pt"), expected], **cache))


def measure_sizes(work: Path) -> dict[str, Any]:
    """Capture the authors' choices at the first size, tune every size and serve; return seconds and rows."""
    capture, cache = work / "sizes", {"TRITON_CACHE_DIR": str(work / "triton")}
    output, captured_s = run([*KERNELTUNE, "capture", "--out", str(capture), "--autotune", "--", *OMITTED], **cache)
    _, tuned_s = run([*KERNELTUNE, "tune", str(capture)], **cache)
    served, _ = run([*KERNELTUNE, "serve", "--configs", str(capture), "--", *OMITTED], **cache)
    steps = {"captured": last_json(output), "served": last_json(served)}
    return {**steps, "capture_s": round(captured_s, 1), "tune_s": round(tuned_s, 1), "rows": size_rows(capture)}


def size_rows(capture: Path) -> list[dict[str, Any]]:
    """Return a row for each tuned class of a capture of omitted_sizes.py: sizes, configs and times."""
    rows = []
    for path in sorted(capture.glob("configs/*/*.json")):
        for entry in json.loads(path.read_text())["entries"]:
            stored = json.loads((capture / "classes" / entry["options"]["launch"] / "class.json").read_text())
            shape = next(one["tensor"]["shape"] for one in stored["arguments"] if one["tensor"])
            rows.append({
                "kernel": stored["kernel"]["name"], "tokens": shape[1], "batch_heads": shape[0] * shape[2],
                "author": stored["choice"], "config": entry["config"],
                **{name: entry["evidence"].get(name) for name in ("default_us", "time_us", "over_default")},
            })  # fmt: skip
    return rows


def sizes(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of sizes that keys leave out: the author's choice at the first size against ours."""
    lines = ["", "| kernel | tokens | batch x heads | author µs | ours µs | speedup | 95 % |", "|---|---|---|---|---|---|---|"]
    gains: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda one: (one["kernel"], one["batch_heads"], one["tokens"])):
        low, high = row["over_default"] or [1.0, 1.0]
        gain = row["default_us"] / row["time_us"]
        gains.setdefault(row["kernel"], []).append(gain)
        shown = f"{row['default_us']:.1f} | {row['time_us']:.1f} | {gain:.3f}x | {low:.3f}-{high:.3f}"
        lines.append(f"| {row['kernel']} | {row['tokens']} | {row['batch_heads']} | {shown} |")
    coarse = {kernel: found for kernel, found in gains.items() if max(found) >= GAINED}
    means = {kernel: math.exp(sum(map(math.log, found)) / len(found)) for kernel, found in coarse.items()}
    lines += ["", *(f"{kernel}: {mean:.3f}x (geometric mean)" for kernel, mean in sorted(means.items()))]
    lines += [f"{kernel}: nothing to gain" for kernel in sorted(set(gains) - set(coarse))]
    if means:
        logs = [math.log(gain) for kernel in coarse for gain in gains[kernel]]
        lines.append(f"kernels whose key was too coarse, all sizes: {math.exp(sum(logs) / len(logs)):.3f}x")
    return lines


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
    omitted = found.get("sizes")
    return "\n".join([*lines, "", *kernels(found.get("table")), *(sizes(omitted["rows"]) if omitted else ())])


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
    parser.add_argument("--sizes", action="store_true", help="also tune kernels at sizes that their keys leave out; 3 minutes")
    parser.add_argument("--from", dest="source", type=Path)
    options = parser.parse_args()
    if options.source is None:
        options.work.mkdir(parents=True, exist_ok=True)
        measure(options.work.resolve(), options.json, options.stock)
        if options.sizes:
            found = json.loads(options.json.read_text()) | {"sizes": measure_sizes(options.work.resolve())}
            options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(json.loads((options.source or options.json).read_text())))


if __name__ == "__main__":
    main()
