"""Tune the calls that ask a getter, and write the tables of vLLM and SGLang.

The engine searches a call as it searches an operator's case. The program's own config stays unless the interval of the paired
final says that another config is faster.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kerneltune import device
from kerneltune.adopt.getter import FACTS, CallCase, call_case, given_knobs, operators, read_facts
from kerneltune.adopt.tuning import Searched, search_tasks, searched
from kerneltune.measuring.check import Outcome
from kerneltune.measuring.jobs import pairs_job, run_jobs
from kerneltune.plan import Options
from kerneltune.progress import Progress
from kerneltune.search.task import Task

ENGINE_TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""Keys of the engines' tables. A table holds all of them, because engines look up the nearest key, however far."""
_PROBLEMS = ("failed", "crashed")


@dataclass(frozen=True, slots=True)
class TunedCall:
    """A call with the config that it should run with.

    Attributes:
        config: the program's own config where nothing was gained.
        own_us, time_us: of a call under the own config and under this config, in the same rounds; None without a time.
        gain: interval of the speedup.
        failed: reasons of the overrides that are not used.
        skipped: why a call that was to be tuned was not; empty if it was.
    """

    one: CallCase
    config: Mapping[str, int]
    own_us: float | None = None
    time_us: float | None = None
    gain: tuple[float, float] = (1.0, 1.0)
    failed: tuple[str, ...] = ()
    skipped: str = ""


def tune_getter(root: Path, options: Options, progress: Progress) -> list[TunedCall]:
    """Tune the calls of a folder; return all calls, also the calls that are wanted for their own config only."""
    facts, (op,) = read_facts(root), operators(str(root))
    tasks = [Task(op, call_case(facts, one), op.variants[0], options.policy or op.policy) for one in facts.cases]
    wanted = [task for task, one in zip(tasks, facts.cases, strict=True) if one.is_wanted and not one.problem]
    search_tasks(root, "getter", root / FACTS, wanted, options, progress)
    return [_tuned_call(*each) for each in zip(tasks, facts.cases, searched(root, tasks), strict=True)]


def _tuned_call(task: Task, one: CallCase, found: Searched) -> TunedCall:
    tried, stored = found
    failed = tuple(each.reason for each in tried.values() if each.status in _PROBLEMS)
    own = one.own | given_knobs(task.default)
    if stored is None or one.problem or not one.is_wanted:
        reason = one.problem or ("no config passed its check" if tried else "it was not searched")
        return TunedCall(one, own if one.own else {}, failed=failed, skipped=reason if one.is_wanted else "")
    entry, best = stored
    default_us, (low, high) = entry.evidence.get("default_us"), entry.evidence.get("over_default") or (1.0, 1.0)
    if low <= 1.0:
        return TunedCall(one, own, default_us, default_us, failed=failed)
    return TunedCall(one, one.own | given_knobs(best), default_us, entry.evidence["time_us"], (low, high), failed)


def check_getter(root: Path) -> list[Outcome]:
    """Check pairs of call and override without a GPU, in a fork; return what `check_pairs` returns."""
    facts, (op,) = read_facts(root), operators(str(root))
    cases = [call_case(facts, one) for one in facts.cases if one.is_wanted and not one.problem]
    ((_, outcomes),) = run_jobs([pairs_job(Task(op, cases[0], op.variants[0], op.policy), cases)])
    return outcomes


def failures(calls: Sequence[TunedCall]) -> str:
    """Return how many overrides are not used, and the most frequent reason; empty if all are."""
    told = Counter(reason for call in calls for reason in call.failed)
    return f"{told.total()} overrides failed; {told.most_common(1)[0][1]} of them: {told.most_common(1)[0][0]}" if told else ""


def engine_tables(engine: str, gpu_name: str, calls: Sequence[TunedCall], named: str = "") -> dict[str, str]:
    """Return the tables of `vllm` or `sglang`, by the path below the folder that the engine is given.

    Args:
        gpu_name: name of the GPU as the driver gives it.
        calls: calls of all keys, with the author's configs where nothing was gained.
        named: further fields of the names, such as `dtype=fp8_w8a8,block_shape=[128,128]`.
    """
    gpu, fields, folder = gpu_name.replace(" ", "_"), f",{named.replace(' ', '')}" if named else "", ""
    if engine == "sglang":
        fields, folder = (
            re.sub(r"(?<=\d),(?=\d)", ", ", fields),
            f"configs/triton_{device.versions()['triton'].replace('.', '_')}/",
        )
    elif "H200" in gpu.split("_"):
        gpu = "NVIDIA_H200"  # all cards of this family share a name in vLLM
    tables: dict[str, dict[str, dict[str, int]]] = {}
    for call in sorted(calls, key=lambda each: each.one.sizes.get("tokens", 0)):
        if lacking := [name for name in ("tokens", "experts", "inner") if name not in call.one.sizes]:
            raise ValueError(f"export: {engine}: size {lacking[0]}: missing")
        sizes = call.one.sizes
        if not call.config:
            raise ValueError(f"export: {engine}: {sizes['tokens']} tokens: {call.one.problem}")
        path = f"{folder}E={sizes['experts']},N={sizes['inner']},device_name={gpu}{fields}.json"
        tables.setdefault(path, {})[str(sizes["tokens"])] = dict(call.config)
    return {path: json.dumps(rows, indent=4) + "\n" for path, rows in tables.items()}
