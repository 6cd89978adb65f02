"""Compile configs for several targets on the CPU alone: the rows that `inspect` shows and the static gate judges.

Knows no operator by name and judges nothing.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kerneltune import cache, device
from kerneltune.inspection.static import StaticRow, Survey
from kerneltune.measuring.assembly import Fact, Kernel, resident
from kerneltune.measuring.compiler import TARGETS, CompileJob, CompilePool, CompileResult
from kerneltune.measuring.inspected import KnownFacts
from kerneltune.search.task import config_values
from kerneltune.spec import Case, Op, Variant


@dataclass(frozen=True, slots=True)
class SurveyRequest:
    """One config to compile."""

    op: Op
    variant: Variant
    case: Case
    policy: str
    config: Any


def cached_requests(ops: Iterable[Op], root: Path | None, gpu: str) -> list[SurveyRequest]:
    """Return every cached config of these operators for a GPU (its folder's name), in the cache's order.

    root: the folder of the cache; None for where kernels look, and the packaged files beside that.

    Raises:
        ValueError: an entry names a variant or knobs that the operator does not have; one line with the file.
    """
    found = []
    for op in ops:
        for entry in cache.load(op.name, gpu, root):
            case = entry.as_case
            try:
                variant = op.variant(entry.variant)
                found.append(SurveyRequest(op, variant, case, entry.policy, variant.config_from(entry.config)))
            except ValueError as error:
                raise ValueError(f"{cache.path_of(op.name, gpu, root)}: {case.name}: {error}") from error
    return found


def default_requests(op: Op, cases: Iterable[Case], takes: Callable[[Variant], bool]) -> list[SurveyRequest]:
    """Request the default configs of an operator's wanted variants, for the cases that they support.

    Raises:
        ValueError: a variant that has none for such sizes.
    """
    found = []
    for case in cases:
        for variant in op.variants:
            if takes(variant) and variant.config is not None and variant.unsupported(case) is None:
                found.append(SurveyRequest(op, variant, case, "cold", variant.default_config(case)))
    return found


def survey(
    requests: Sequence[SurveyRequest],
    targets: Sequence[str],
    workers: int | None = None,
    stage: Callable[[str, int], None] = lambda _name, _total: None,
    advance: Callable[[str], None] = lambda _text: None,
    known: Mapping[str, KnownFacts] = MappingProxyType({}),
) -> Survey:
    """Compile every request for every target; a config that cannot be compiled is a row with its error.

    Requests that differ in nothing that reaches the compiler are compiled once: kernels by Triton's disk cache, and whole
    requests, of one case under several policies, here. Kernels that are `known`, by target, are compiled to Triton's own IR only.
    """
    rows = []
    facts: dict[str, dict[str, Fact]] = {}
    for target in targets:
        distinct = {_job_key(request): request for request in requests}
        stage(f"compile for {target}", len(distinct))
        compiled = {}
        most = min(len(distinct), workers or len(os.sched_getaffinity(0)))
        facts[target] = {}
        with CompilePool(TARGETS[target], most, known=known.get(target, KnownFacts({}))) as pool:
            jobs = [CompileJob(partial(r.op.inputs, r.case), r.variant.run, r.config) for r in distinct.values()]
            for (key, request), answer in zip(distinct.items(), pool.compile(jobs), strict=True):
                compiled[key] = answer
                facts[target] |= answer.facts
                advance(f"{request.op.name} {request.variant.name} {request.case.name}")
        rows += [_row(request, target, compiled[_job_key(request)]) for request in requests]
    unknown = sum(digest not in known[target].facts for target in known for digest in facts[target])
    return Survey(device.versions()["triton"], tuple(rows), facts, unknown)


def _job_key(request: SurveyRequest) -> tuple[str, str, Case, Any]:
    return request.op.name, request.variant.name, request.case, request.config


def case_text(case: Case) -> str:
    """Return a case as the rows name it: its name, then sizes, type, mode and options."""
    return f"{case.name} {case.label}"


def _row(request: SurveyRequest, target: str, compiled: CompileResult) -> StaticRow:
    """Merge launches of one kernel that use the same resources: a kernel that is launched once per tensor is one of the row."""
    kernels = tuple(dict.fromkeys(compiled.kernels))
    return StaticRow(
        request.op.name,
        request.variant.name,
        case_text(request.case),
        request.policy,
        target,
        config_values(request.config) or {},
        () if compiled.error else kernels,
        compiled.error or _unfit(kernels, target, getattr(request.config, "ctas", 0)),
    )


def _unfit(kernels: Sequence[Kernel], target: str, ctas: int) -> str:
    """Return why a kernel that compiles could not be launched; empty where nothing is in the way.

    ctas: programs that an SM must hold of a cooperative grid.
    """
    for kernel in kernels:
        held = resident(kernel, target)
        if not held.programs:
            return f"{kernel.name}: no program fits an SM: {held.limiter}"
        if kernel.cooperative and held.programs < ctas:
            return f"{kernel.name}: {held.programs} programs fit an SM, not {ctas}: {held.limiter}"
    return ""
