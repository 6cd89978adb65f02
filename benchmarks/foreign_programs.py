"""Run programs and models that no part of kerneltune names, as their users would, each in fresh processes with empty caches.

    python benchmarks/foreign_programs.py [--only NAME,NAME] [--share I/N] [--seconds S] [--limit S] [--out DIR] [--list]

Needs a GPU, and transformers, flash-linear-attention, fla-core, liger-kernel, torchao and einops; package-* and layers-* need
the packages that package_kernels.py and layer_packages.py name, engine-* the folder of examples/adopted_packages/cut_kernels.py.
A line for each item:

- capture, tune and serve a program: its results under `serve` against its results under `capture`, launches that were served and
  missed, configs timed at run time, and the time of a step under the first configs, served, and with the authors' own tuning
  where the time limit leaves time for that, with the sum of the times of kernels and copies, whose gain has an interval of 95 %;
- convert a model to fp8 training and back: losses of three steps in bf16 and fp8, what was converted, and the time of a step;
- sweep shapes that no sweep has, untuned: the share of the ceiling that each reaches.

Verdicts: passed; failed; time limit; not run (a package is missing, or the program fails without kerneltune). The exit code is
1 where an item failed. DIR/results.json has all figures, DIR/NAME the output of each item.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kerneltune.records import load
from kerneltune.reporting.shares import share
from kerneltune.stats import ratio_interval

PROGRAMS = Path(__file__).with_name("foreign")
ROOT = PROGRAMS.parent.parent
LAYERS = (
    "rwkv7", "kda", "mamba2", "nsa", "hgrn2", "forgetting_attn", "gated_deltanet", "delta_net", "multiscale_retention",
    "lightning",
)  # fmt: skip
MODELS = (
    "mixtral", "granitemoe", "glm4_moe", "olmoe", "qwen2_moe", "gpt_oss", "deepseek_v2", "phi3", "gemma3_text", "t5", "vit",
    "bert", "gpt_neox", "falcon", "cohere", "llama4_text", "minimax", "phimoe", "ernie4_5_moe", "modernbert",
    "siglip_vision_model", "gpt2",
)  # fmt: skip
PACKAGES = (
    "adam", "blocks", "experts", "mamba", "maxsim", "sinkhorn", "splash", "swiglu", "attention", "lion", "selected", "linear",
    "codebooks",
)  # fmt: skip
AUTOTUNED = ("experts", "mamba", "maxsim", "sinkhorn", "splash", "swiglu", "lion", "codebooks")
"""Packages of which the kernels with an autotuner are captured alone."""
LAYER_PACKAGES = (
    "norms", "convolution", "diffusion", "optimizers", "ternary", "experts", "xlstm", "attention", "engine", "int4",
)  # fmt: skip
RARE = ("arguments", "graphs", "threads", "made", "operators")
SIZES = (1024, 2048, 4096)
UNTUNED = (
    "rmsnorm_fwd", "fp8_rowwise_2d", "fp8_tensorwise_2d", "fp8_rowwise_3d_transpose", "fp8_group_colwise", "fp8_grouped_gemm",
)  # fmt: skip
LARGEST_ERROR = 0.02
"""Largest distance between results relative to their norm: other configs round sums in bf16 elsewhere."""
LARGEST_LOSS, LARGEST_GRADIENT, LARGEST_NOISE = 0.01, 0.35, 5e-3
"""Largest distances of losses and gradients in fp8, and of gradients that atomic additions sum up in another order."""
LARGEST_GRADIENTS = {"phimoe": 0.6}
"""Largest distances of gradients of models that draw experts in training. Weights rounded to e4m3 alone move them by 0.45 in bf16
(by a script outside the repository, on the CPU, 2026-11-30)."""
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLA_CACHE_DIR")
SWITCHES = {"CCE_AUTOTUNE": "1"}
"""Variables that let a package autotune its kernels."""
IMPORTS = 2.2
"""Seconds that serving, and the checks of `tune`, are expected to take, times the seconds of the capture."""
LIMITS_S = {"package-selected": 240, "fla": 210, "liger": 150, "torchao": 150, "gemlite": 240, "gems": 240, "conch": 150}
"""Seconds of items by the beginning of their names, where more than --limit: imports take 20 s, or a kernel compiles for 40 s."""
NOTHING_TO_CONVERT = ("falcon", "gpt2")
"""Models whose linear layers have forward passes of their own or are no nn.Linear; conversion names each with this reason."""
FAILED, PASSED, LIMIT, NOT_RUN = "failed", "passed", "time limit", "not run"


class EndedError(Exception):
    """Say how an item ended before its last command."""

    def __init__(self, verdict: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict = verdict


@dataclass
class Item:
    """Hold what runs in the folder of an item.

    Attributes:
        out: folder of the item.
        until: time.monotonic() at which the item ends.
        figures: what the item has found.
    """

    out: Path
    until: float
    figures: dict[str, Any] = field(default_factory=dict)

    def command(self, name: str, *words: str, **environment: str) -> tuple[int, str]:
        """Run a command with caches of its own; return exit code and output, which NAME.txt keeps.

        Raises:
            EndedError: the time of the item is over.
        """
        caches = {variable: str(self.out / f"{name}-{variable.lower()}") for variable in CACHES}
        given = os.environ | caches | SWITCHES | {"PYTHONPATH": os.pathsep.join(paths()), "COLUMNS": "150"} | environment
        began = time.monotonic()
        with (self.out / f"{name}.txt").open("w") as file:
            file.write(f"$ {' '.join(words)}\n")
            file.flush()
            process = subprocess.Popen(
                words, cwd=self.out, env=given, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                process.wait(max(1.0, self.until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise EndedError(LIMIT, f"{name} had not ended") from None
            finally:
                self.figures[f"{name}_s"] = round(time.monotonic() - began, 1)
                for sign in (signal.SIGTERM, signal.SIGKILL):
                    end_group(process, sign)
        return process.returncode, (self.out / f"{name}.txt").read_text(errors="replace")


def end_group(process: "subprocess.Popen[bytes]", sign: signal.Signals) -> None:
    """End what a command has started, and wait a moment."""
    try:
        os.killpg(process.pid, sign)
    except ProcessLookupError:
        return
    try:
        process.wait(3)
    except subprocess.TimeoutExpired:
        return


def paths() -> list[str]:
    """Return the folders that programs import from."""
    return [str(PROGRAMS), str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def last_json(text: str) -> dict[str, Any] | None:
    """Return the last line of an output that is a JSON object."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return dict(json.loads(line))
            except ValueError:
                continue
    return None


def last_line(text: str) -> str:
    """Return the last line of an output that says something, cut to a line of a table."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["no output"])[-1][:160]


def why_not_run(text: str) -> str | None:
    """Return why a program cannot run here, or None if it is not for a missing package."""
    found = re.findall(r"No module named '?([\w.]+)|cannot import name '?(\w+)", text)
    return f"{''.join(found[-1])} is not installed" if found else None


def largest_error(first: Path, second: Path) -> float:
    """Return the largest distance between two files of results, relative to the norm of a result."""
    wanted, found = torch.load(first), torch.load(second)
    if [a.shape for a in wanted] != [b.shape for b in found]:
        return float("inf")
    errors = [float((b - a).norm() / a.norm().clamp_min(1e-30)) for a, b in zip(wanted, found, strict=True)]
    return max((float("inf") if error != error else error for error in errors), default=float("inf"))


def adopted(program: str, *words: str, plain: bool = False, ignored: str = "", eager: bool = False) -> Callable[[Item], None]:
    """Return an item that captures, tunes and serves a program.

    plain, ignored, eager: options of `capture`.
    """

    def run(item: Item) -> None:
        python = [sys.executable, str(PROGRAMS / program), *words]
        tool, folder, figures = [sys.executable, "-m", "kerneltune"], str(item.out / "cap"), item.figures
        options = ["--plain"] * plain + ["--eager"] * eager + (["--ignore-arg", ignored] if ignored else [])
        first, second = item.out / "capture.pt", item.out / "serve.pt"
        code, text = item.command("capture", *tool, "capture", "--out", folder, *options, "--", *python, FOREIGN_OUT=str(first))
        captured = last_json(text)
        if code or captured is None:
            why = why_not_run(text)
            if why is None:
                alone, output = item.command("alone", *python)
                why = f"fails without kerneltune as well: {last_line(output)}" if alone else None
            raise EndedError(NOT_RUN if why else FAILED, why or f"capture ended with {code}: {last_line(text)}")
        if not captured["finite"]:
            raise EndedError(NOT_RUN, "the program's results are not finite")
        figures["captured_ms"] = captured["step_ms"]
        budget = max(10.0, item.until - time.monotonic() - IMPORTS * figures["capture_s"])
        code, text = item.command("tune", *tool, "tune", folder, "--budget", f"{budget:.0f}")
        left = re.search(r"used: (\d+) class", text)
        figures["classes"], figures["left"] = count(r"(\d+) class(?:es)? tuned", text), int(left[1]) if left else 0
        figures["not_reached"] = re.findall(r"skipped: (\S+).*not reached", text)
        if code and not left:
            raise EndedError(FAILED, f"tune ended with {code}: {last_line(text)}")
        policy = ["--miss", "default"] * bool(left)
        code, text = item.command("serve", *tool, "serve", "--configs", folder, *policy, "--", *python, FOREIGN_OUT=str(second))
        served = last_json(text)
        if code or served is None:
            raise EndedError(FAILED, f"serve ended with {code}: {last_line(text)}")
        figures |= {"served_ms": served["step_ms"], "timings": served["timings"], "error": largest_error(first, second)}
        figures |= {"served": count(r"(\d+) launches served", text), "missed": count(r"served, (\d+) not tuned", text)}
        try:
            code, output = item.command("alone", *python)
            authors = last_json(output) or {}
            figures["authors_ms"] = authors.get("step_ms") if not code else last_line(output)
            if authors.get("gpu_ms") and served["gpu_ms"]:
                gain = ratio_interval(np.array(authors["gpu_ms"]), np.array(served["gpu_ms"]))
                figures["gpu_ms"] = [statistics.median(times) for times in (authors["gpu_ms"], served["gpu_ms"])]
                figures["gain"] = [round(part, 4) for part in (gain.median, gain.low, gain.high)]
        except EndedError:
            figures["authors_ms"] = "time limit"
        wrong = [f"{figures['error']:.2g} apart"] * (figures["error"] > LARGEST_ERROR)
        wrong += [f"{figures['timings']} timings at run time"] * bool(figures["timings"])
        wrong += [f"{figures['missed']} launches missed"] * bool(figures["missed"] and not left)
        wrong += ["nothing was served"] * (not figures["served"] and not eager)
        if wrong:
            raise EndedError(FAILED, "; ".join(wrong))

    return run


def count(pattern: str, text: str) -> int:
    """Return the number that a pattern finds last in a text, 0 if none."""
    return int((re.findall(pattern, text) or [0])[-1])


def converted(*words: str) -> Callable[[Item], None]:
    """Return an item that converts a model to fp8 training and back."""

    def run(item: Item) -> None:
        code, text = item.command("convert", sys.executable, str(PROGRAMS / "convert_model.py"), *words)
        found = last_json(text)
        item.figures.update(found or {})
        if code or found is None:
            why = why_not_run(text)
            raise EndedError(NOT_RUN if why else FAILED, why or f"ended with {code}: {last_line(text)}")
        if "refused" in found:
            if words[0] not in NOTHING_TO_CONVERT:
                raise EndedError(FAILED, found["refused"])
            return
        wrong = [f"losses are {100 * found['largest']:.2f} % apart"] * (not found["largest"] <= LARGEST_LOSS)
        allowed = LARGEST_GRADIENTS.get(words[0], LARGEST_GRADIENT)
        wrong += [f"gradients are {found['gradients']:.2g} apart"] * (not 0 < found["gradients"] <= allowed)
        if wrong := wrong + [f"the reverted model is {found['reverts']:.2g} apart"] * (found["reverts"] > LARGEST_NOISE):
            raise EndedError(FAILED, "; ".join(wrong))

    return run


def untuned(op: str) -> Callable[[Item], None]:
    """Return an item that measures an operator at shapes of no sweep, with the configs at hand."""

    def run(item: Item) -> None:
        results = item.out / "results"
        words = ["sweep", str(PROGRAMS / "untuned.yaml"), "--op", op, "--no-tune", "--no-peers", "--results", str(results)]
        code, text = item.command("sweep", sys.executable, "-m", "kerneltune", *words)
        shares: dict[str, float] = {}
        for record in (record for path in results.rglob("*.jsonl") for record in load(path)):
            if record.variant == "optimized" and (part := share(record)) is not None:
                shares[" ".join([record.case, record.quant, *map(str, record.options.values())])] = round(part, 1)
        item.figures["shares"] = shares
        if code or not shares:
            raise EndedError(FAILED, f"sweep ended with {code}: {last_line(text)}")
        item.figures["median_share"], item.figures["least_share"] = statistics.median(shares.values()), min(shares.values())

    return run


ITEMS: dict[str, Callable[[Item], None]] = {
    "tuples": adopted("tuples.py"),
    "descriptors": adopted("descriptors.py"),
    **{f"untuned-{op}": untuned(op) for op in UNTUNED},
    "plain": adopted("plain_kernels.py", plain=True, ignored="seed"),
    "gluon": adopted("gluon_kernels.py", plain=True),
    "compiled": adopted("compiled.py", eager=True),
    **{f"fla-{name}": adopted("fla_layer.py", name) for name in LAYERS},
    **{f"liger-{name}": adopted("liger_losses.py", name, plain=True) for name in ("losses", "norms", "elementwise")},
    **{f"torchao-{name}": adopted("torchao_casts.py", name, plain=True) for name in ("blockwise", "mx", "attention")},
    **{f"sage-{name}": adopted("sage_attention.py", name, plain=True) for name in ("dense", "varlen")},
    **{f"gemlite-{name}": adopted("gemlite_layers.py", name, plain=True) for name in ("int8", "int4")},
    **{f"conch-{name}": adopted("conch_kernels.py", name, plain=True) for name in ("decode", "products", "vision")},
    **{f"author-{name}": adopted("author_kernels.py", name, plain=True) for name in ("cross_entropy", "mlstm", "scan")},
    **{
        f"tutorial-{name}": adopted("tutorials.py", name, plain=True)
        for name in ("softmax", "norm", "attention", "persistent", "operator")
    },
    **{f"engine-{name}": adopted("engine_kernels.py", name, plain=True) for name in ("attention", "decode", "lora", "sglang")},
    **{f"layers-{name}": adopted("layer_packages.py", name, plain=True) for name in LAYER_PACKAGES},
    **{f"gems-{name}": adopted("flag_gems_ops.py", name, plain=True) for name in ("norms", "products")},
    **{f"package-{name}": adopted("package_kernels.py", name, plain=name not in AUTOTUNED) for name in PACKAGES},
    **{f"rare-{name}": adopted("rare_launches.py", name, eager=name == "operators") for name in RARE},
    **{f"fp8-{kind}": converted(kind) for kind in MODELS},
    **{f"fp8-size-{hidden}": converted("size", str(hidden)) for hidden in SIZES},
}
SHOWN = (
    "captured_ms", "served_ms", "authors_ms", "gpu_ms", "gain", "served", "missed", "timings", "error", "classes", "left",
    "not_reached", "largest", "gradients", "converted", "bf16_ms", "fp8_ms", "median_share", "least_share",
)  # fmt: skip


def run_item(name: str, out: Path, limit_s: float) -> dict[str, Any]:
    """Run an item in a folder of its own; return verdict, reason, seconds and figures."""
    began = time.monotonic()
    item = Item(out / name, began + limit_s)
    verdict, reason = PASSED, ""
    try:
        item.out.mkdir(parents=True, exist_ok=False)
        ITEMS[name](item)
    except EndedError as ended:
        verdict, reason = ended.verdict, str(ended)
    except KeyboardInterrupt:
        verdict, reason = LIMIT, "interrupted"
    except Exception as error:  # an item that breaks this script is an item that failed
        verdict, reason = FAILED, f"{type(error).__name__}: {error}"[:200]
    return {"name": name, "verdict": verdict, "reason": reason, "seconds": round(time.monotonic() - began, 1), **item.figures}


def line_of(row: Mapping[str, Any]) -> str:
    """Return the line of an item."""
    figures = [
        f"{name} {row[name]:.4g}" if isinstance(row[name], float) else f"{name} {row[name]}" for name in SHOWN if name in row
    ]
    return f"{row['verdict']:10} {row['name']:28} {row['seconds']:6.1f} s  {', '.join(figures)}  {row['reason']}".rstrip()


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of items, or their beginnings, with commas between")
    parser.add_argument("--share", default="1/1", help="I/N: items I, I + N, I + 2 N, …, counted from 1")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no item after this time")
    parser.add_argument("--limit", type=float, default=90, help="seconds of an item; more for packages that import slowly")
    parser.add_argument("--out", type=Path, default=Path("foreign_results"), help="new folder of the results")
    parser.add_argument("--list", action="store_true", help="print the names of the items")
    given = parser.parse_args(words)
    if (parts := re.fullmatch(r"(\d+)/(\d+)", given.share)) is None or not 1 <= int(parts[1]) <= int(parts[2]):
        parser.error(f"--share: {given.share!r}: expected I/N with 1 <= I <= N")
    wanted = [part for part in given.only.split(",") if part]
    if unknown := [part for part in wanted if not any(name.startswith(part) for name in ITEMS)]:
        parser.error(f"--only: no item begins with {unknown[0]!r}: see --list")
    names = [name for name in ITEMS if not wanted or any(name.startswith(part) for part in wanted)]
    given.names = names[int(parts[1]) - 1 :: int(parts[2])]
    return given


def main() -> int:
    """Run the share of the items; return the exit code."""
    given, began = arguments(), time.monotonic()
    if given.list:
        print("\n".join(given.names))
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in given.names:
        if time.monotonic() - began > given.seconds:
            print(f"{given.seconds:g} s are over: {len(given.names) - len(rows)} items were not started", flush=True)
            break
        limit_s = max([given.limit, *(longer for begin, longer in LIMITS_S.items() if name.startswith(begin))])
        rows.append(run_item(name, given.out.resolve(), limit_s))
        print(line_of(rows[-1]), flush=True)
        (given.out / "results.json").write_text(json.dumps(rows, indent=1))
    print({verdict: sum(row["verdict"] == verdict for row in rows) for verdict in (PASSED, FAILED, LIMIT, NOT_RUN)})
    return int(any(row["verdict"] == FAILED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
