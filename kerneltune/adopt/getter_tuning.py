"""Tune calls that ask a getter for their config, and write the tables of vLLM and SGLang."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from kerneltune import device
from kerneltune.adopt import getter
from kerneltune.adopt.expert_layer import Weights
from kerneltune.adopt.tuning import SearchResult, search_results, search_tasks
from kerneltune.plan import Options
from kerneltune.progress import Progress
from kerneltune.task import Outcome, Run, Task


@dataclass(frozen=True, slots=True)
class TunedCall:
    """Hold a call and the config that the call should run with.

    Attributes:
        config: the program's own config where nothing was gained.
        evidence: of the search; without an interval where nothing was gained, empty for a call without times.
        failed: reasons of the overrides that are not used.
        skipped: why a call that was to be tuned was not; empty if it was.
    """

    case: getter.CallCase
    config: Mapping[str, int]
    evidence: Mapping[str, Any] = field(default_factory=dict)
    failed: tuple[str, ...] = ()
    skipped: str = ""

    @property
    def is_faster(self) -> bool:
        """Return whether the config is surely faster than the program's own."""
        return "over_default" in self.evidence


def tune_getter(root: Path, options: Options, progress: Progress) -> list[TunedCall]:
    """Tune the calls of a folder; return all calls, also the calls that are wanted for their own config only.

    The program's own config stays unless the interval of the paired final says that another config is faster.
    """
    spec, (op,) = getter.read_spec(root), getter.operators(str(root))
    tasks = [Task(op, getter.call_case(spec, case), op.variants[0], options.policy or op.policy) for case in spec.cases]
    wanted = [task for task, case in zip(tasks, spec.cases, strict=True) if case.is_searched]
    search_tasks(root, "getter", root / getter.FILE, wanted, options, progress)
    return [_tuned_call(*of_call) for of_call in zip(tasks, spec.cases, search_results(root, tasks), strict=True)]


def _tuned_call(task: Task, case: getter.CallCase, found: SearchResult) -> TunedCall:
    tried, stored = found
    failed = tuple(evaluation.reason for evaluation in tried.values() if evaluation.status in ("failed", "crashed"))
    own = case.own | getter.given_knobs(task.default)
    if stored is None or not case.is_searched:
        reason = case.problem or ("no config passed its check" if tried else "it was not searched")
        return TunedCall(case, own if case.own else {}, failed=failed, skipped=reason if case.is_wanted else "")
    evidence = stored.entry.evidence
    if (evidence.get("over_default") or (1.0, 1.0))[0] > 1.0:
        return TunedCall(case, case.own | getter.given_knobs(stored.config), evidence, failed)
    default_us = evidence.get("default_us")
    return TunedCall(case, own, {"default_us": default_us, "time_us": default_us} if default_us else {}, failed)


def check_getter(root: Path) -> list[Outcome]:
    """Check calls, then pairs of call and override, without a GPU; return a call's failure, else what `check_pairs` returns."""
    from kerneltune.checking.jobs import CaseJob, pairs_job, run_jobs

    spec, (op,) = getter.read_spec(root), getter.operators(str(root))
    cases = [getter.call_case(spec, case) for case in spec.cases if case.is_searched]
    tasks = [Task(op, case, op.variants[0], op.policy) for case in cases]
    for job, (outcome,) in run_jobs([CaseJob.of([Run(task, task.default)]) for task in tasks]):
        if outcome.status == "failed":
            return [replace(outcome, config=job.task.default, case=job.task.case)]
    ((_, outcomes),) = run_jobs([pairs_job(tasks[0], cases)])
    return outcomes


ENGINE_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""Keys of the engines' tables. A table holds all of them, because engines look up the nearest key, however far."""


_TABLES = (
    (("tokens", "N", "K"), dict.fromkeys(("vllm", "sglang"), "N={N},K={K},device_name={gpu}{fields}.json")),
    (("tokens", "experts", "inner"), {
        "vllm": "E={experts},N={inner},device_name={family}{fields}.json",
        "sglang": "configs/triton_{triton}/E={experts},N={inner},device_name={gpu}{fields}.json",
    }),
)  # fmt: skip
"""Sizes of a linear and of an expert layer, and the paths of their tables. `family`: the name that vLLM gives each H200."""


def engine_tables(engine: str, gpu_name: str, calls: Sequence[TunedCall], weights: Weights) -> dict[str, str]:
    """Return the tables of `vllm` or `sglang`, by the path below the folder that the engine is given.

    The engines read tables of linear layers from a folder of their package.

    Args:
        gpu_name: name of the GPU as the driver gives it.
        calls: calls of all keys, with the author's configs where nothing was gained.
        weights: how the weights of the calls are quantized.
    """
    needed, paths = next((kind for kind in _TABLES if any(set(kind[0]) <= set(call.case.sizes) for call in calls)), _TABLES[-1])
    gpu, fields = gpu_name.replace(" ", "_"), "".join(f",{name}={value}" for name, value in msgspec.to_builtins(weights).items())
    if engine == "vllm":  # its names do not tell scales of rows from scales of experts
        gpu, fields = re.sub(r"[\s/]+", "_", gpu_name), fields.replace(" ", "").replace(",per_channel_quant=True", "")
    names = {"gpu": gpu, "family": "NVIDIA_H200" if "H200" in gpu.split("_") else gpu, "fields": fields}
    names["triton"] = device.versions()["triton"].replace(".", "_")
    if "K" in needed and not weights.block_shape:
        raise ValueError(f"export: {engine}: named: block_shape: missing: no engine looks up a table of a linear layer without")
    tables: dict[str, dict[str, dict[str, int]]] = {}
    for call in sorted(calls, key=lambda call: call.case.sizes.get("tokens", 0)):
        sizes = call.case.sizes
        if lacking := [name for name in needed if name not in sizes]:
            raise ValueError(f"export: {engine}: size {lacking[0]}: missing")
        if not call.config:
            raise ValueError(f"export: {engine}: {sizes['tokens']} tokens: {call.case.problem}")
        tables.setdefault(paths[engine].format_map(sizes | names), {})[str(sizes["tokens"])] = dict(call.config)
    return {path: json.dumps(rows, indent=4) + "\n" for path, rows in tables.items()}
