"""`kerneltune noise`: what a config shows against itself, with the compile pool idle and busy."""

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import show, show_table


def command(
    family: o.Family,
    op: o.OpNames = None,
    case: o.CaseNames = None,
    dtype: o.Dtypes = None,
    quant: o.Quants = None,
    policy: o.PolicyName = "cold",
    workers: o.Workers = None,
) -> None:
    """A/A on the first selected case: exit code 1 if the floor with a busy pool exceeds that with an idle one by 0.5 %.

    The measuring process has a core of its own, the pool has the others.
    """
    known = o.load_ops()
    from kerneltune import device
    from kerneltune.plan import load_plan
    from kerneltune.tuning.noise import disturbance

    selection = o.make_selection(known, family, op, case, dtype, quant, ["optimized"] if op else None)
    options = o.make_options(policy, workers=workers)
    entries = [entry for entry in load_plan(known, selection).bench if selection.takes(entry)]
    if not entries:
        raise ValueError("case: none selected: expected a bench case of the sweep")
    if not device.current().is_gpu:
        raise ValueError("noise needs a GPU: in the interpreter nothing can be timed")
    chosen = known[entries[0].op]
    variant = next((v for v in reversed(chosen.variants) if v.config is not None and not v.is_peer), None)
    if variant is None:
        raise ValueError(f"{chosen.name}: no variant of ours has knobs: expected an operator with one that has")
    idle, busy = disturbance(chosen, entries[0].case, variant, variant.default_config(entries[0].case), options)
    show(f"{chosen.name} {variant.name} {entries[0].case.label}, default config against itself")
    rows = []
    for name, noise in (("idle", idle), ("busy", busy)):
        rows.append((name, f"{noise.time_us.median:.2f}", f"{100 * noise.floor:.2f} %", f"{100 * noise.spread:.2f} %"))
    show_table(("compile pool", "time µs", "A/A floor", "p10–p90 spread"), rows)
    if busy.floor > idle.floor + 0.005:
        raise typer.Exit(1)
