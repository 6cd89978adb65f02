"""`kerneltune cache observe`: what the rules of unrecorded cases are fitted to."""

from collections.abc import Mapping
from typing import Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import show
from kerneltune.cli.progress import reporter
from kerneltune.spec import Case, Op, Variant

OpsGiven = Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Only these operators, in this order.")]


def observe(
    ops: OpsGiven = None,
    variant: Annotated[str, typer.Option("--variant", metavar="NAME", help="Whose configs.")] = "optimized",
    dtype: o.Dtypes = None,
    case: o.CaseNames = None,
    most: Annotated[int, typer.Option("--most", metavar="N", help="Configs per case.")] = 14,
    cases: Annotated[int | None, typer.Option("--cases", metavar="N", help="Cases per operator, evenly among all.")] = None,
    budget: Annotated[float | None, typer.Option("--budget", metavar="SECONDS", help="Begin no case after that.")] = None,
    configs: o.Configs = None,
    results: o.Results = None,
    workers: o.Workers = None,
) -> None:
    """Time on recorded cases and on those of the sweeps the configs that a rule may choose; keep the times beside the records.

    The configs of a case are its own, the default, and those of other cases, as they are or with knobs that follow a size.
    """
    from kerneltune import device
    from kerneltune.plan import require_gpu
    from kerneltune.tuning.observing import Asked, targets
    from kerneltune.tuning.observing import observe as run
    from kerneltune.tuning.task import Work
    from kerneltune.tuning.transfer import donors_of, rivals

    known = o.load_ops()
    names = [o.choice("op", name, known) for name in ops or _with_variant(known, variant)]
    require_gpu("cache observe")
    folder = o.results_root(results)
    o.require_writable(folder)
    options = o.make_options("cold", budget_s=budget, configs=configs, results=folder, workers=workers)
    bench = _bench(known)
    asked = []
    for name in names:
        op, of = known[name], known[name].variant(variant)
        donors = donors_of(op, of, "cold", device.current().slug, configs)
        wanted = [target for target in targets(op, of, donors, bench.get(name, [])) if _is_wanted(target, dtype, case)]
        for target in wanted[:: -(-len(wanted) // cases) or 1] if cases else wanted:
            asked.append(Asked(Work(op, target, of), tuple(rivals(op, of, target, donors, most))))
    with reporter() as progress:
        count = run(asked, options, progress)
    show(f"{count} of {len(asked)} cases timed: {folder / device.current().slug / 'observations'}")


def _with_variant(known: Mapping[str, Op], name: str) -> list[str]:
    return [op.name for op in known.values() if any(_has_knobs(variant, name) for variant in op.variants)]


def _has_knobs(variant: Variant, name: str) -> bool:
    return variant.name == name and variant.config is not None


def _is_wanted(case: Case, dtypes: list[str] | None, names: list[str] | None) -> bool:
    import fnmatch

    return (not dtypes or case.dtype in dtypes) and (not names or any(fnmatch.fnmatch(case.name, name) for name in names))


def _bench(known: Mapping[str, Op]) -> dict[str, list[Case]]:
    """The bench cases of all sweep files of the checkout or package, by operator."""
    from kerneltune import sweep
    from kerneltune.files import data_root

    found: dict[str, list[Case]] = {}
    for path in sorted(data_root("sweeps").glob("*.yaml")):
        for entry in sweep.load(path, known).bench:
            found.setdefault(entry.op, []).append(entry.case)
    return found
