"""Simulated spaces with the structure of measured spaces, for tests of the search; never measured, never shipped."""

import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

from kept_trials import TrialBlock

from kerneltune.spec import Case
from kerneltune.task import Evaluation, Knobs

KNOBS: Mapping[str, tuple[Any, ...]] = {
    "rows": (1, 2, 4, 8),
    "cols": (256, 512, 1024, 2048, 4096),
    "warps": (1, 2, 4, 8, 16),
    "ctas": (0, 1, 2, 4),
    "stages": (1, 2, 3),
    "reload": (False, True),
}


def space(seed: int, quant: str = "none", **changes: Any) -> TrialBlock:
    """Make the space of a memory-bound kernel.

    Too few warps do not hide the latency, too many elements per thread spill, a loop over tiles needs a pipeline, some values
    cost what chance says, neighbours differ by a per cent or two; about one config in seven gives no time.
    """
    rng = random.Random(seed)
    work = rng.uniform(8, 14)
    quirks = {(knob, value): abs(rng.gauss(0, 0.05)) for knob, values in KNOBS.items() for value in values}
    pairs = {(w, c): abs(rng.gauss(0, 0.04)) for w in KNOBS["warps"] for c in KNOBS["ctas"]}
    trials: dict[Knobs, Evaluation] = {}
    for values in itertools.product(*KNOBS.values()):
        config = dict(zip(KNOBS, values, strict=True))
        per_thread = config["rows"] * config["cols"] / (32 * config["warps"])
        if not 2 <= per_thread <= 128 or (config["ctas"] == 0) != (config["stages"] == 1):
            continue
        registers = 24 + 1.6 * per_thread * (1 - 0.3 * config["reload"])
        knobs = tuple(config.items())
        resources = int(min(255, registers)) * config["warps"] * 32
        if registers > 200:
            trials[knobs] = Evaluation("spills", None, "", resources, int(registers - 180))
            continue
        resident = max(1, min(config["ctas"] or 8, 65536 // max(resources, 1)))
        latency = 0.5 * abs(math.log2(resident * config["warps"] * per_thread * max(1, config["stages"] - 1) / 2**work)) ** 1.3
        cost = 1 + 0.12 * latency + (0.08 if config["reload"] and per_thread < 32 else 0.0)
        cost *= math.prod(1 + quirks[pair] for pair in knobs) * (1 + pairs[config["warps"], config["ctas"]])
        time_us = 20.0 * cost * math.exp(rng.gauss(0, 0.012))
        trials[knobs] = Evaluation("passed", time_us, "", resources, 0, 1024)
    case = Case(f"made-up-{seed}", (("M", 4096 << seed % 4), ("N", 4096)), "bfloat16", quant)
    about: dict[str, Any] = {
        "op": "made_up", "variant": "optimized", "policy": "cold", "device": "none", "driver": "none", "torch": "none",
        "triton": "none", "source_hash": "none", "commit": "none", "date": "never", "command": "none",
        "default": next(iter(trials)), "rows": tuple((case, knobs, trial) for knobs, trial in trials.items()),
    }  # fmt: skip
    return TrialBlock(**{**about, **changes})
