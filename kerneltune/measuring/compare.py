"""The variants of one case: checked, timed interleaved beside the ceiling, made into Records.

Chooses no config and prints nothing. May import torch.
"""

import functools
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from kerneltune import device
from kerneltune.errors import first_line
from kerneltune.measuring.check import CaseError, Checker, broken_context
from kerneltune.measuring.rounds import POLICIES, Contender, Policy, interleave, rotation, throttled
from kerneltune.records import Record, rounded
from kerneltune.search.trials import knobs_of
from kerneltune.spec import Case, Config, Inputs, Op, Variant
from kerneltune.stats import Samples, median_interval, ratio_interval

SELF = "A/A"
_CEILING = "ceiling"
_TIMING = ("time_us", "gbps", "ceiling_gbps", "pct_ceiling", "ci_low_us", "ci_high_us", "n", "aa_floor", "p10_us", "p90_us")
_BYTES_PER_TRAFFIC_BYTE = 8
"""Memory for inputs, outputs, the fp32 reference and its comparison, per byte of traffic."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The streaming operator that a case is held against, and its config for a case of that operator."""

    op: Op
    variant: Variant
    config: Config
    case: Case


class ContextLostError(ValueError):
    """A launch after which nothing can run on the GPU in this process.

    Attributes:
        variant: whose launch it was; empty where that is not known.
        reason: what was raised.
    """

    def __init__(self, variant: str, reason: str) -> None:
        super().__init__(variant, reason)
        self.variant, self.reason = variant, reason

    def __str__(self) -> str:
        return f"{self.variant or 'a launch'}: {self.reason}: nothing more can run on the GPU in this process"


def memory_shortage(op: Op, case: Case) -> str | None:
    """None if the case fits the GPU, else the bytes needed and free."""
    needed = _BYTES_PER_TRAFFIC_BYTE * op.traffic(case).total
    free = _free_bytes()
    return f"needs {needed:,} bytes, {free:,} are free" if needed > free else None


def obstacle(op: Op, case: Case, policy: str) -> str | None:
    """None if the case can be timed under a policy, else why not: it does not fit the GPU, or its calls would not be cold."""
    try:
        _sets(op, case, POLICIES[policy])
    except ValueError as error:
        return str(error)
    return memory_shortage(op, case)


def release_memory() -> None:
    """Give back what torch keeps of the GPU's memory for later, so that another process finds it."""
    torch.cuda.empty_cache()


def check_only(
    family: str,
    op: Op,
    case: Case,
    variants: Sequence[tuple[Variant, Config]],
    apart: Callable[[Variant, Config], list[str]] | None = None,
) -> list[Record]:
    """Records without times: `checked`, `failed` or `skipped`.

    Args:
        apart: says what is wrong with a variant on the GPU, which it finds out in another process; without it they are
            checked on the CPU, in this one.
    """
    checker = None
    records = []
    for variant, config in variants:
        reason = variant.unsupported(case) or (memory_shortage(op, case) if apart else None)
        if reason is not None:
            records.append(make_record(family, op, case, variant, config, "cold", "skipped", reason))
            continue
        if apart is not None:
            errors = apart(variant, config)
        else:
            try:
                checker = checker or Checker(op, case, "cpu")
                errors = checker.errors(variant, config)
            except CaseError as error:
                errors = [str(error)]
        records.append(
            make_record(family, op, case, variant, config, "cold", "failed" if errors else "checked", "; ".join(errors))
        )
    return records


def compare(
    family: str,
    op: Op,
    case: Case,
    variants: Sequence[tuple[Variant, Config]],
    policy: str,
    ceiling: Ceiling | None,
    lost: Mapping[str, str] = MappingProxyType({}),
) -> list[Record]:
    """Check every variant, time those that are correct in one interleaved run, one Record each.

    The first correct variant is timed twice: what it shows against itself is the noise floor of all rows of the case.

    Args:
        lost: variants that failed elsewhere and are not launched here, and why.

    Raises:
        ContextLostError: a launch took the process's context with the GPU along.
    """
    reason = obstacle(op, case, policy)
    if reason is not None:
        return [make_record(family, op, case, v, c, policy, "skipped", reason) for v, c in variants]
    try:
        checker = Checker(op, case, "cuda")
    except CaseError as error:
        return [make_record(family, op, case, v, c, policy, "failed", str(error)) for v, c in variants]
    reasons = {name: ("failed", reason) for name, reason in lost.items()}
    for variant, config in variants:
        unsupported = variant.unsupported(case)
        if variant.name in lost:
            continue
        if unsupported is not None:
            reasons[variant.name] = ("skipped", unsupported)
        elif errors := _errors(checker, variant, config):
            reasons[variant.name] = ("failed", "; ".join(errors))
            _require_context(variant.name, "; ".join(errors))
    del checker
    torch.cuda.empty_cache()
    samples = _time(op, case, [(v, c) for v, c in variants if v.name not in reasons], policy, ceiling, reasons)
    torch.cuda.empty_cache()
    floor = noise_floor(samples)
    ceiling_gbps = _ceiling_gbps(samples, ceiling)
    records = []
    for variant, config in variants:
        if variant.name in reasons:
            records.append(make_record(family, op, case, variant, config, policy, *reasons[variant.name]))
        else:
            times = timing(samples[variant.name], op.traffic(case).total, ceiling_gbps, floor)
            records.append(make_record(family, op, case, variant, config, policy, "passed", "", **times))
    return records


def _errors(checker: Checker, variant: Variant, config: Config) -> list[str]:
    try:
        return checker.errors(variant, config)
    except torch.cuda.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        return [first_line(error)]


def _require_context(variant: str, reason: str) -> None:
    """Raises ContextLostError where the reason is one for all that follows."""
    if broken_context():
        raise ContextLostError(variant, reason)


def _time(
    op: Op,
    case: Case,
    variants: Sequence[tuple[Variant, Config]],
    policy_name: str,
    ceiling: Ceiling | None,
    reasons: dict[str, tuple[str, str]],
) -> dict[str, Samples]:
    if not variants:
        return {}
    policy = POLICIES[policy_name]
    inputs = input_sets(op, case, policy)
    contenders: dict[str, Contender] = {}
    for variant, config in variants:
        try:
            contenders[variant.name] = contender(variant, config, inputs, policy)
            if len(contenders) == 1:
                contenders[SELF] = contender(variant, config, inputs, policy)
        except Exception as error:  # what another package raises under capture is a result, not our failure
            reasons[variant.name] = ("failed", f"cannot be timed: {first_line(error)}")
            _require_context(variant.name, reasons[variant.name][1])
    if not contenders:
        return {}
    try:
        if ceiling is not None and (stream_inputs := _inputs_beside(ceiling, policy)):
            contenders[_CEILING] = contender(ceiling.variant, ceiling.config, stream_inputs, policy)
        return time_contenders(contenders)
    except RuntimeError as error:
        _require_context("", f"cannot be timed: {first_line(error)}")
        raise


def _inputs_beside(ceiling: Ceiling, policy: Policy) -> list[Inputs]:
    """Input sets of a ceiling; none, and so no ceiling, where what else is timed leaves too little memory for them."""
    try:
        return input_sets(ceiling.op, ceiling.case, policy)
    except ValueError:
        return []


def time_contenders(contenders: Mapping[str, Contender]) -> dict[str, Samples]:
    """Interleaved samples, in an order of its own in every process."""
    return interleave(contenders, throttled=throttled, seed=os.getpid())


def input_sets(op: Op, case: Case, policy: Policy) -> list[Inputs]:
    """As many input sets as make every call find the L2 as the policy says.

    Raises:
        ValueError: there is not the memory for these, or they are too many.
    """
    return [op.inputs(case, device="cuda", seed=i) for i in range(_sets(op, case, policy))]


def _sets(op: Op, case: Case, policy: Policy) -> int:
    return rotation(policy, op.traffic(case).total, device.current().l2_bytes, _free_bytes())


def contender(
    variant: Variant, config: Config, inputs: Sequence[Inputs], policy: Policy, after: Callable[[int], None] | None = None
) -> Contender:
    """A variant that walks over input sets; `after` as in Contender."""
    return Contender(lambda i: variant.run(inputs[i], config), len(inputs), policy, after=after)


def noise_floor(samples: dict[str, Samples]) -> float | None:
    """How far from 1 the interval of a variant against itself reaches."""
    if SELF not in samples:
        return None
    first = next(iter(samples.values()))
    interval = ratio_interval(first, samples[SELF])
    return max(abs(interval.low - 1), abs(interval.high - 1))


def _ceiling_gbps(samples: dict[str, Samples], ceiling: Ceiling | None) -> float | None:
    if ceiling is None or _CEILING not in samples:
        return None
    return ceiling.op.traffic(ceiling.case).total / median_interval(samples[_CEILING]).median / 1e3


def timing(samples: Samples, traffic_bytes: int, ceiling_gbps: float | None, floor: float | None) -> dict[str, Any]:
    """The measured fields of a record, from the samples (rounds,) of one process."""
    interval = median_interval(samples)
    gbps = traffic_bytes / interval.median / 1e3
    p10, p90 = (
        float(q) for q in (sorted(samples)[int(0.1 * (len(samples) - 1))], sorted(samples)[int(0.9 * (len(samples) - 1))])
    )
    return {
        "time_us": _rounded(interval.median),
        "gbps": _rounded(gbps),
        "ceiling_gbps": _rounded(ceiling_gbps),
        "pct_ceiling": _rounded(100 * gbps / ceiling_gbps if ceiling_gbps else None),
        "ci_low_us": _rounded(interval.low),
        "ci_high_us": _rounded(interval.high),
        "n": len(samples),
        "aa_floor": _rounded(floor),
        "p10_us": _rounded(p10),
        "p90_us": _rounded(p90),
        "samples_us": [[_rounded(time_us) for time_us in samples]],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else rounded(value)


def make_record(
    family: str, op: Op, case: Case, variant: Variant, config: Config, policy: str, status: str, reason: str, **times: Any
) -> Record:
    """A record of this device and source; `times` are the fields of `timing`."""
    fields: dict[str, Any] = dict.fromkeys(_TIMING) | times | device.versions()
    here = device.current()
    return Record(
        op=op.name,
        variant=variant.name,
        case=case.name,
        dtype=case.dtype,
        quant=case.quant,
        policy=policy,
        status=status,
        config=config_values(config),
        device=here.name,
        driver=here.driver,
        unit=here.unit,
        source_hash=op.source_hash,
        commit=commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        axes=dict(case.axes),
        options=dict(case.options),
        reason=reason,
        family=family,
        **fields,
    )


def config_values(config: Config) -> dict[str, Any] | None:
    """A config as JSON; None for none."""
    return None if config is None else knobs_of(config)


@functools.cache
def commit() -> str:
    """The commit of the source that runs, with `+` where the package differs from it.

    Outside a checkout, what `git archive` wrote into `.git_archival.txt`; `unknown` where there is neither.
    """
    root = Path(__file__).parents[2]
    try:
        head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain", "kerneltune"], cwd=root, capture_output=True, text=True)
        return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        archived = root / ".git_archival.txt"
        node = archived.read_text().strip() if archived.exists() else ""
        return "unknown" if not node or "$" in node else node


def _free_bytes() -> int:
    free, _total = torch.cuda.mem_get_info()
    return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
