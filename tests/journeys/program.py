"""Run the journeys: `python tests/journeys [--only NAME,NAME] [--out DIR]`, by `make gpu`.

Exit code 0: none failed. 1: a journey failed. 2: no GPU, or bad input. 130: interrupted; outputs of earlier journeys are kept.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import proof
from journey import HERE, JOURNEYS, ROOT, Journey, inside
from runner import FAILED, INTERRUPTED, Runner, gpu_here, table


def main(command: Sequence[str] = (sys.executable, str(HERE))) -> int:
    """Return the exit code; command: runs one journey, with `--inside NAME`."""
    options = _options()
    if options.inside:
        return inside(JOURNEYS[options.inside], Path(options.said))
    if options.list or options.proof:
        return proof.show(list(JOURNEYS), is_written=options.proof)
    chosen = _chosen(options.only)
    out = Path(options.out).resolve()
    gpu = gpu_here()
    if gpu["slug"] == "interpreter" and not options.without_gpu:
        raise ValueError("no NVIDIA GPU that torch can use: journeys run on one")
    print(f"{gpu['name']}, torch {gpu['torch']}, triton {gpu['triton']}; outputs in {out}", flush=True)
    is_kept = not options.no_proof and gpu["slug"] != "interpreter"
    keep = partial(proof.keep, out, gpu) if is_kept else lambda _: None
    return _run(Runner(out, gpu, command, keep), chosen)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--only", default="", help="names of journeys, separated by commas")
    parser.add_argument("--out", default=os.environ.get("GPU_OUT") or str(ROOT / "results" / "runs" / "gpu"))
    parser.add_argument("--list", action="store_true", help="run nothing: list the journeys that have not passed with this code")
    parser.add_argument("--proof", action="store_true", help="the same, and write the state into the documents")
    parser.add_argument("--no-proof", action="store_true", help="do not change proof.json")
    parser.add_argument("--without-gpu", action="store_true", help="run the journeys that need none")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--said", help=argparse.SUPPRESS)
    return parser.parse_args()


def _chosen(only: str) -> list[Journey]:
    """Return the journeys of these names, all for none.

    Raises:
        ValueError: an unknown name.
    """
    names = [name for name in only.replace(",", " ").split()] or list(JOURNEYS)
    for name in names:
        if name not in JOURNEYS:
            raise ValueError(f"JOURNEY: {name!r}: expected one of {', '.join(JOURNEYS)}")
    return [JOURNEYS[name] for name in names]


def _run(runner: Runner, chosen: list[Journey]) -> int:
    """Run, show the table and keep it."""
    began, code = time.monotonic(), 0
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        runner.run(chosen)
    except KeyboardInterrupt:
        code = 130
    endings = [runner.ended[one.name] for one in chosen if one.name in runner.ended]
    text = table(endings)
    print(f"\n{text}\n{time.monotonic() - began:.0f} s in all", flush=True)
    (runner.out / "table.txt").write_text(text + "\n")
    summary = {"gpu": dict(runner.gpu), "journeys": [asdict(one) for one in endings]}
    (runner.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return code or int(any(one.passed in (FAILED, INTERRUPTED) for one in endings))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def exit_code(command: Sequence[str] = (sys.executable, str(HERE))) -> int:
    """Return that of `main`, bad input told in one line."""
    try:
        return main(command)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
