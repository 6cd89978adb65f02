"""The variants of one case: checked, timed interleaved beside the ceiling, made into Records.

Chooses no config and prints nothing. May import torch.
"""

import functools
import os
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch

from kerneltune import device
from kerneltune.errors import first_line
from kerneltune.measuring.check import CaseError, Checker, broken_context
from kerneltune.measuring.memory import OutOfMemory, affordable, host_free_bytes
from kerneltune.measuring.rounds import POLICIES, Contender, Policy, interleave, rotation, throttled
from kerneltune.records import Record, Status, rounded
from kerneltune.search.trials import knobs_of
from kerneltune.spec import Case, Config, Inputs, Op, Variant
from kerneltune.stats import Samples, deciles, median_interval, ratio_interval

Untimed = tuple[str, str]
"""Status and reason of a record without a time."""

SELF = "A/A"
_CEILING = "ceiling"
CEILING_OP = "stream"
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


def ceiling_case(op: Op, case: Case) -> Case:
    """Return the case of the streaming operator that moves as many bytes."""
    traffic = op.traffic(case)
    return Case(f"{traffic.read}+{traffic.write}", (("read", traffic.read), ("write", traffic.write)), "int32")


class BrokenContextError(ValueError):
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


def memory_obstacle(op: Op, case: Case) -> str | None:
    """Return None if the case fits the memory of the GPU, or of this machine without one, else the bytes needed and free."""
    needed = _BYTES_PER_TRAFFIC_BYTE * op.traffic(case).total
    free = gpu_free_bytes() if device.current().is_gpu else host_free_bytes()
    return f"needs {needed:,} bytes, {free:,} are free" if needed > free else None


def obstacle(op: Op, case: Case, policy: str) -> str | None:
    """Return None if the case can be timed under a policy; else that it does not fit the GPU, or that no call would be cold."""
    try:
        _sets(op, case, POLICIES[policy])
    except ValueError as error:
        return str(error)
    return memory_obstacle(op, case)


def check_only(
    family: str,
    op: Op,
    case: Case,
    variants: Sequence[tuple[Variant, Config]],
    check_in_child: Callable[[Variant, Config], Untimed] | None = None,
) -> list[Record]:
    """Make records without times: `checked`, `failed` or `skipped`.

    Args:
        check_in_child: checks a variant on the GPU in a subprocess; without it variants are checked on the CPU, in this process.
    """
    checker = None
    records = []
    for variant, config in variants:
        reason = variant.unsupported(case) or memory_obstacle(op, case)
        if reason is not None:
            records.append(make_record(family, op, case, variant, config, "cold", "skipped", reason))
            continue
        if check_in_child is not None:
            outcome = check_in_child(variant, config)
        else:
            try:
                checker = checker or Checker(op, case, "cpu")
                errors = checker.errors(variant, config)
            except CaseError as error:
                errors = [str(error)]
            outcome = ("failed" if errors else "checked", "; ".join(errors))
        records.append(make_record(family, op, case, variant, config, "cold", *outcome))
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

    The first correct variant is timed twice: what it shows against itself is the noise floor of all rows of the case. A variant
    that runs out of memory is skipped, and so is a ceiling; all are where it is what they share that does not fit.

    Args:
        variants: one alone may be there twice; its second record is of its second time.
        lost: variants that failed elsewhere and are not launched here, and why.

    Raises:
        ContextLostError: a launch took the process's context with the GPU along.
    """
    outcomes: dict[str, Untimed] = {name: ("failed", reason) for name, reason in lost.items()}
    once = list({variant.name: (variant, config) for variant, config in variants}.values())
    samples: dict[str, Samples] = {}
    shared = _check(op, case, once, policy, outcomes)
    if shared is None:
        torch.cuda.empty_cache()
        samples = _time(op, case, [(v, c) for v, c in once if v.name not in outcomes], policy, ceiling, outcomes)
        torch.cuda.empty_cache()
    floor = noise_floor(samples)
    ceiling_gbps = _ceiling_gbps(samples, ceiling)
    records: list[Record] = []
    for variant, config in variants:
        outcome = outcomes.get(variant.name, shared)
        if outcome is not None:
            records.append(make_record(family, op, case, variant, config, policy, *outcome))
        else:
            again = any(record.variant == variant.name for record in records)
            times = timing(samples[SELF if again else variant.name], op.traffic(case).total, ceiling_gbps, floor)
            records.append(make_record(family, op, case, variant, config, policy, "passed", "", **times))
    return records


def _check(
    op: Op, case: Case, variants: Sequence[tuple[Variant, Config]], policy: str, outcomes: dict[str, Untimed]
) -> Untimed | None:
    """Check the variants that have no outcome; `outcomes` gains those that cannot be timed. Return what keeps all from it."""
    reason = obstacle(op, case, policy)
    if reason is not None:
        return "skipped", reason
    try:
        checker = affordable(lambda: Checker(op, case, "cuda"))
    except CaseError as error:
        return "failed", str(error)
    if isinstance(checker, OutOfMemory):
        return "skipped", checker.reason
    for variant, config in variants:
        if variant.name not in outcomes and (outcome := _check_variant(checker, case, variant, config)) is not None:
            outcomes[variant.name] = outcome
    return None


def _check_variant(checker: Checker, case: Case, variant: Variant, config: Config) -> Untimed | None:
    """Return None for a correct variant, else why it is not timed."""
    unsupported = variant.unsupported(case)
    if unsupported is not None:
        return "skipped", unsupported
    errors = affordable(partial(checker.errors, variant, config))
    if not errors:
        return None
    outcome = ("skipped", errors.reason) if isinstance(errors, OutOfMemory) else ("failed", "; ".join(errors))
    _require_context(variant.name, outcome[1])
    return outcome


def _require_context(variant: str, reason: str) -> None:
    """Raise ContextLostError where the reason is one for all that follows."""
    if broken_context():
        raise BrokenContextError(variant, reason)


def _time(
    op: Op,
    case: Case,
    variants: Sequence[tuple[Variant, Config]],
    policy_name: str,
    ceiling: Ceiling | None,
    outcomes: dict[str, Untimed],
) -> dict[str, Samples]:
    """Sample the variants that can be timed; `outcomes` gains the others."""
    if not variants:
        return {}
    policy = POLICIES[policy_name]
    inputs = input_sets(op, case, policy)
    if isinstance(inputs, OutOfMemory):
        outcomes |= {variant.name: ("skipped", inputs.reason) for variant, _ in variants}
        return {}
    contenders: dict[str, Contender] = {}
    for variant, config in variants:
        names = (variant.name,) if contenders else (variant.name, SELF)
        made = _capture(names, variant, config, inputs, policy)
        if isinstance(made, dict):
            contenders |= made
        else:
            outcomes[variant.name] = made
    if not contenders:
        return {}
    samples = _sample(contenders, ceiling, policy)
    if isinstance(samples, OutOfMemory):
        outcomes |= {variant.name: ("skipped", samples.reason) for variant, _ in variants if variant.name in contenders}
        return {}
    return samples


def _capture(
    names: Iterable[str], variant: Variant, config: Config, inputs: Sequence[Inputs], policy: Policy
) -> dict[str, Contender] | Untimed:
    """Capture a variant once per name, or say why it cannot be timed."""
    try:
        made = affordable(lambda: {name: contender(variant, config, inputs, policy) for name in names})
    except Exception as error:  # what another package raises under capture is a result, not our failure
        outcome = "failed", f"cannot be timed: {first_line(error)}"
    else:
        if not isinstance(made, OutOfMemory):
            return made
        outcome = "skipped", made.reason
    _require_context(variant.name, outcome[1])
    return outcome


def _sample(contenders: dict[str, Contender], ceiling: Ceiling | None, policy: Policy) -> dict[str, Samples] | OutOfMemory:
    """Time the contenders, and beside them the ceiling where its inputs fit the memory."""
    try:
        if ceiling is not None:
            beside = affordable(partial(_ceiling_contender, ceiling, policy))
            if not isinstance(beside, OutOfMemory):
                contenders[_CEILING] = beside
        return affordable(partial(time_contenders, contenders))
    except RuntimeError as error:
        _require_context("", f"cannot be timed: {first_line(error)}")
        raise


def _ceiling_contender(ceiling: Ceiling, policy: Policy) -> Contender | OutOfMemory:
    inputs = input_sets(ceiling.op, ceiling.case, policy)
    return inputs if isinstance(inputs, OutOfMemory) else contender(ceiling.variant, ceiling.config, inputs, policy)


def time_contenders(contenders: Mapping[str, Contender]) -> dict[str, Samples]:
    """Sample the contenders interleaved, in an order of its own in every process."""
    return interleave(contenders, throttled=throttled, seed=os.getpid())


def input_sets(op: Op, case: Case, policy: Policy) -> list[Inputs] | OutOfMemory:
    """Make as many input sets as make every call find the L2 as the policy says, if there is the memory for them."""
    try:
        count = _sets(op, case, policy)
    except ValueError as error:
        return OutOfMemory(str(error))
    return affordable(lambda: [op.inputs(case, device="cuda", seed=i) for i in range(count)])


def _sets(op: Op, case: Case, policy: Policy) -> int:
    return rotation(policy, op.traffic(case).total, device.current().l2_bytes, gpu_free_bytes())


def contender(
    variant: Variant, config: Config, inputs: Sequence[Inputs], policy: Policy, after: Callable[[int], None] | None = None
) -> Contender:
    """Make a variant that walks over input sets; `after` as in Contender."""
    return Contender(lambda i: variant.run(inputs[i], config), len(inputs), policy, after=after)


def noise_floor(samples: dict[str, Samples]) -> float | None:
    """Return how far from 1 the interval of a variant against itself reaches."""
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
    """Return the measured fields of a record, from the samples (rounds,) of one process."""
    interval = median_interval(samples)
    gbps = traffic_bytes / interval.median / 1e3
    p10, p90 = deciles(samples)
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
    """Make a record of this device and source; `times` are the fields of `timing`."""
    fields: dict[str, Any] = dict.fromkeys(_TIMING) | times | device.versions()
    here = device.current()
    return Record(
        op=op.name,
        variant=variant.name,
        case=case.name,
        dtype=case.dtype,
        quant=case.quant,
        policy=policy,
        status=cast(Status, status),
        config=config_values(config),
        device=here.name,
        driver=here.driver,
        unit=here.unit,
        source_hash=variant.source_hash,
        commit=commit(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        axes=dict(case.axes),
        options=dict(case.options),
        reason=reason,
        family=family,
        role=variant.role,
        flops=op.flops(case) if op.flops is not None else None,
        **fields,
    )


def config_values(config: Config) -> dict[str, Any] | None:
    """Return a config as JSON; None for none."""
    return None if config is None else knobs_of(config)


@functools.cache
def commit() -> str:
    """Return the commit of the source that runs, with `+` where the package differs from it.

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


def gpu_free_bytes() -> int:
    """Return the bytes of the GPU's memory that torch can still allocate."""
    free, _total = torch.cuda.mem_get_info()
    return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
