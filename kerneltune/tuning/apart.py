"""Checks and comparisons in another process than this one, which a launch can take along.

Decides nothing and stores nothing.
"""

from collections.abc import Mapping, Sequence

from kerneltune.measuring.compare import Ceiling, Fate, compare
from kerneltune.processes import in_fresh_processes
from kerneltune.records import Record
from kerneltune.spec import Case, Config, Op, Variant
from kerneltune.tuning.bench import Measuring
from kerneltune.tuning.isolated import ChildLostError, Named


def check_apart(bench: Measuring, op: Op, case: Case, variant: Variant, config: Config) -> Fate:
    """What a checking bench says becomes of a variant, also where its process is lost."""
    bench.open(op, case, variant, "")
    try:
        trial = bench.trial(config, None)
    except ChildLostError as error:
        return "failed", f"lost: {error}"
    if trial.status == "ok":
        return "checked", ""
    if trial.status == "memory":
        return "skipped", trial.detail
    return "failed", trial.detail if trial.status == "wrong" else f"{trial.status}: {trial.detail}"


def compare_apart(
    family: str,
    op: Op,
    case: Case,
    variants: Sequence[tuple[Variant, Config]],
    policy: str,
    ceiling: Ceiling | None,
    lost: Mapping[str, str],
) -> list[Record]:
    """As measuring.compare, in a fresh process.

    Raises:
        ContextLostError: a launch took that process's context along.
        ValueError: the process crashed, or took too long.
    """
    named = [(_named(op, variant), config) for variant, config in variants]
    beside = (_named(ceiling.op, ceiling.variant), ceiling.config, ceiling.case) if ceiling is not None else None
    (rows,) = in_fresh_processes(1, _compare, family, case, named, policy, beside, dict(lost))
    return rows


def _named(op: Op, variant: Variant) -> Named:
    return Named(op.module, op.name, variant.name)


def _compare(
    family: str,
    case: Case,
    named: Sequence[tuple[Named, Config]],
    policy: str,
    beside: tuple[Named, Config, Case] | None,
    lost: Mapping[str, str],
) -> list[Record]:
    """In the process of its own."""
    loaded = [(*name.load(), config) for name, config in named]
    ceiling = Ceiling(*beside[0].load(), beside[1], beside[2]) if beside is not None else None
    return compare(family, loaded[0][0], case, [(variant, config) for _, variant, config in loaded], policy, ceiling, lost)
