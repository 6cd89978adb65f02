"""`kerneltune sweep`: check, tune, measure, record and tabulate a family."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from kerneltune import device
from kerneltune.cli import loading
from kerneltune.cli import options as o
from kerneltune.cli.console import end_if_failed, messages, note, show, show_wrapped, unaccepted, width
from kerneltune.cli.progress import Reporter
from kerneltune.plan import Options, Plan, Selection
from kerneltune.processes.start import start_server
from kerneltune.records import Record, grouped
from kerneltune.reporting.tables import case_statuses, check_table, sweep_table
from kerneltune.spec import Op
from kerneltune.table import Column, Row, Table
from kerneltune.wording import assignments, counted, first_of

if TYPE_CHECKING:
    from kerneltune.stale import Stale
    from kerneltune.sweep_run import SweepResult


@o.ungrouped()
def command(
    family: o.Family = "",
    *,
    selection: Selection,
    policy: o.PolicyName = None,
    tune: Annotated[bool, o.flag("--tune/--no-tune", "Tune cases that the config cache lacks.")] = True,
    peers: Annotated[bool, o.flag("--peers/--no-peers", "Measure the operators of other packages, too.")] = True,
    quick: Annotated[bool, o.flag("--quick", "Ten cases, untuned: only times; with --check-only only checks.")] = False,
    stale: Annotated[bool, o.flag("--stale", "Measure again what other code measured: FAMILY, or all families.")] = False,
    budget: Annotated[float | None, o.seconds("Tuning time per case; with --stale time of all.")] = None,
    trials: o.Trials = None,
    check_only: Annotated[bool, o.flag("--check-only", "Check against the reference and stop there.")] = False,
    mutate: Annotated[bool, o.flag("--mutate", "With --check-only: perturb right outputs; `compare` must refuse them.")] = False,
    strict: Annotated[bool, o.flag("--strict", "With --check-only: fail where a line of the checks asks to be read.")] = False,
    accept: o.Accept = None,
    configs: o.Configs = None,
    results: o.Results = None,
    workers: o.Workers = None,
) -> None:
    """Check, tune missing configs, measure all variants and peers, and keep the records.

    Without a GPU the check cases run in Triton's interpreter: correctness is checked there, without timing. On a GPU a first
    table of ten cases appears before anything is tuned and before peers that compile are measured; with --quick these cases are
    all, and nothing is tuned. A family may also be the folder of a capture, where configs and results then go.

    --stale times each config that other code chose against its default, and stores the faster; it drops a config that does not
    run where the default does. Then it measures the cases whose records are of other code or of another config. The most used
    cases come first, and a run continues where the last run ended. Without a GPU, and with --check-only, it lists them and the
    minutes that they take.

    --mutate tests `compare`: one element, one row, a zeroed tail, truncation and a scale of 1.01 must be refused on some check
    case. The command fails where `compare` accepts one of the first three. It lists an accepted truncation or scale, which a
    tolerance may allow.

    --strict is for CI without a GPU. A line to read with the text of an --accept leaves the exit code at 0.

    Exit code 1 if one of our own variants fails, a stale config no longer runs, or --strict finds a line; 2 if an operator's
    inputs or reference fail, if every row is skipped, or if --stale finds no records.
    """
    o.use_configs(configs)
    o.refuse("expected only with --check-only", mutate=mutate and not check_only, strict=strict and not check_only)
    o.refuse("expected only with --strict", accept=None if strict else accept)
    o.refuse("not with --mutate", strict=strict and mutate)
    folder = loading.capture_folder(family)
    fields: dict[str, Any] = {"policy": policy, "peers": peers, "budget_s": budget, "workers": workers}
    fields["extent"] = "check" if check_only else ("tune" if tune and not quick else "measure")
    if stale:
        o.refuse("not with --stale", mutate=mutate, quick=quick, trials=trials, no_tune=not tune)
        if folder:
            raise ValueError(f"family: {family!r}: expected a family of sweeps/; `tune {family} --force` searches it again")
        ops = loading.load_ops()
        return _renew(ops, replace(selection, family=family), loading.make_options(results=results, **fields))
    if not family:
        raise ValueError(loading.missing_family())
    file = family
    if folder:
        o.use_capture(folder)
        file = str(Path(folder, "sweep.yaml"))
    if device.may_have_gpu():
        start_server()  # its imports take as long as the imports of this process
    plan = loading.make_plan(file, selection, results=results, quick=quick, trials=trials, **fields)
    loading.require_folders(plan.options)
    if mutate:
        return _show_mutations(plan)
    _run(plan, family, folder, strict, accept or [])


def _run(plan: Plan, family: str, capture: str, strict: bool, accepted: Sequence[str]) -> None:
    """Run the stages of a sweep, named by a family or by the folder of a capture; show records and files.

    A check ends with 1 if a variant failed or, with strict, if a line to read has none of the accepted texts.
    """
    from kerneltune.sweep_run import run_sweep

    with Reporter() as progress:
        swept = run_sweep(plan, progress, lambda rows: show(sweep_table(rows, brief=True).text(width()) + "\n"))
    measures = device.current().is_gpu and plan.options.extent != "check"
    is_timed = measures or any(record.time_us is not None for record in swept.records)
    to_read = unaccepted([outcome.reason for outcome in swept.coverage if outcome.status == "noted"], accepted)
    if is_timed:
        show(sweep_table(swept.records, brief=True).text(width()))
    else:
        _show_checks(plan, family, capture, swept, to_read)
    for op in (plan.ops[name] for name in dict.fromkeys(record.op for record in swept.records)):
        for variant in plan.variants(op.name, installed=False) if op.kind == "foreign" else ():
            show_wrapped(f"{op.name} {variant.name}: left out: its requires are not installed: {', '.join(variant.missing())}")
    for path in swept.files:
        show(f"wrote {path}", messages)
    if all(record.status == "skipped" for record in swept.records):
        reasons = first_of(dict.fromkeys(record.reason for record in swept.records), 1)
        nothing = "nothing timed" if is_timed else "nothing checked"
        raise ValueError(f"{plan.sweep.path}: {nothing}: {counted(len(swept.records), 'row')} skipped: {reasons}")
    own = [record for record in swept.records if not plan.ops[record.op].variant(record.variant).is_peer]
    if is_timed:
        return end_if_failed(own)
    _end_checks(own, swept, len(to_read), strict)


def _show_checks(plan: Plan, family: str, capture: str, swept: "SweepResult", to_read: Collection[str]) -> None:
    """Show the table of checks, and lines about cases that were skipped or not checked, and about the coverage."""
    show(check_table(swept.records, to_read).text(width()))
    show("")
    skipped = [record for record in swept.records if record.status == "skipped"]
    for (op_name, variant_name), rows in grouped(skipped, lambda record: (record.op, record.variant)).items():
        reasons = first_of(dict.fromkeys(record.reason for record in rows), 2)
        show_wrapped(f"{op_name} {variant_name}: skipped {counted(len(rows), 'case')}: {reasons}")
    if capture:
        _show_unchecked(plan, swept.records, Path(capture))
    if plan.options.extent != "check":
        show_wrapped(
            f"On a GPU, `kerneltune sweep {family}` also tunes what lacks a config, times all variants and peers, and writes "
            f"records and tables to {plan.options.results}."
        )
    for outcome in swept.coverage:
        word = "to read: " if outcome.reason in to_read else "accepted: " if outcome.status == "noted" else ""
        show_wrapped(f"{word}{outcome.reason}")


def _end_checks(own: Sequence[Record], swept: "SweepResult", num_to_read: int, strict: bool) -> None:
    """Show as the last line whether the checks passed; end with 1 if one of the own variants' records did not."""
    statuses = case_statuses(swept.records)
    num_passed, num_failed, to_read = statuses["checked"], statuses["failed"], f"{counted(num_to_read, 'line')} to read"
    lines = f", {to_read}" if num_to_read else ""
    end_if_failed(own, f"FAILED: {num_failed} of {counted(num_passed + num_failed, 'check')}{lines}", swept.passed)
    if strict and num_to_read:
        show(f"FAILED: {to_read} (--strict); {counted(num_passed, 'check')} passed")
        raise typer.Exit(1)
    peers = f", {num_failed} of other packages failed" if num_failed else ""
    show(f"passed: {counted(num_passed, 'check')}{peers}{lines}{' (--strict fails)' if num_to_read else ''}")


def _renew(ops: Mapping[str, Op], selection: Selection, options: Options) -> None:
    """List the stale configs and records, and on a GPU measure them again."""
    from kerneltune import stale

    gpu = device.current()
    measures = gpu.is_gpu and options.extent != "check"
    if measures:
        loading.require_folders(options)
    plans = stale.plans_of(ops, selection, options)
    files = [path for plan in plans for path in options.results.glob(f"*/{plan.family}.jsonl")]
    files += loading.config_files()
    slugs = [gpu.slug] if gpu.is_gpu else sorted({path.parent.name for path in files})
    stales = [stale.find(plans, slug) for slug in slugs]
    table = _stale_table(stales)
    if table.rows:
        show(table.text(width()))
    elif not any(any((options.results / slug).glob("*.jsonl")) for slug in slugs):
        raise ValueError(f"results: {options.results}: no records of {', '.join(slugs) or 'any GPU'} that could be stale")
    elif not measures:
        show_wrapped(f"nothing is stale for {', '.join(slugs)} in {options.results}")
    for gpu_stale in stales:
        for family in gpu_stale.families:
            if family.num_orphans:
                orphans = counted(family.num_orphans, "record")
                note(f"{gpu_stale.gpu}: {family.plan.family}: {orphans} of no case of {family.plan.sweep.path}")
    if measures:
        _measure_stale(ops, stales[0])


def _measure_stale(ops: Mapping[str, Op], gpu_stale: "Stale") -> None:
    """Measure the stale configs and records of this GPU again, and show the results."""
    from kerneltune import stale

    with Reporter() as progress:
        renewal = stale.renew(gpu_stale, progress)
    broken = [(entry, result) for entry, result in renewal.configs if result.status in ("failed", "dropped")]
    num_kept = sum(result.entry is not None and result.entry.config == entry.config for entry, result in renewal.configs)
    num_slower = len(renewal.configs) - num_kept - len(broken)
    show_wrapped(
        f"configs: {num_kept} as good as their default, {num_slower} slower, which the default replaces, "
        f"{len(broken)} that no longer run; {counted(len(renewal.records), 'record')} made"
    )
    for entry, result in broken:
        show_wrapped(f"{result.status}: {entry.op} {entry.variant} {entry.case.label}: {result.reason}")
    if any(result.status == "dropped" for _, result in broken):
        show_wrapped("calls no longer run with the dropped configs; `kerneltune tune` searches their cases")
    remaining = renewal.remaining
    if remaining.configs or remaining.num_stale_cases:
        counts = f"{counted(len(remaining.configs), 'config')} and {counted(remaining.num_stale_cases, 'case')}"
        show_wrapped(f"{counts} are stale; the same command goes on there")
    else:
        show_wrapped(f"nothing is stale for {gpu_stale.gpu}")
    end_if_failed(r for r in renewal.records if not ops[r.op].variant(r.variant).is_peer)
    if broken:
        raise typer.Exit(1)


class _StaleLine(NamedTuple):
    """Hold a line about stale configs or cases of an operator or a family."""

    kind: str
    name: str
    num_stale: int
    num_known: int
    minutes: float


def _stale_table(stales: "Sequence[Stale]") -> Table:
    """Return a row per operator with its stale configs and per family with its stale cases."""
    from kerneltune.stale import CONFIG_S

    rows = []
    for gpu_stale in stales:
        num_stale, lines = Counter(entry.op for entry in gpu_stale.configs), list[_StaleLine]()
        for op, num_cached in sorted(gpu_stale.num_cached.items()):
            lines.append(_StaleLine("configs", op, num_stale[op], num_cached, CONFIG_S * num_stale[op] / 60))
        for family in gpu_stale.families:
            minutes = family.seconds_a_case * len(family.stale) / 60
            lines.append(_StaleLine("cases", family.plan.family, len(family.stale), family.num_cases, minutes))
        num_known, minutes = sum(line.num_known for line in lines), sum(line.minutes for line in lines)
        lines.append(_StaleLine("all", "", sum(line.num_stale for line in lines), num_known, minutes))
        rows += [Row((gpu_stale.gpu, *line)) for line in lines if line.num_stale]
    columns = (Column("gpu", shared=True), Column("of", shared=True), Column("op or family"))
    return Table((*columns, Column("stale", digits=0), Column("known", digits=0), Column("about min", digits=1)), tuple(rows))


def _show_mutations(plan: Plan) -> None:
    """List the mutations that each `compare` refused and accepted; exit with 1 if a `compare` accepts a gross mistake."""
    from kerneltune.checking.mutations import MEANING
    from kerneltune.cpu_checks import mutate_outputs

    outcomes = mutate_outputs(plan)
    for outcome in outcomes:
        show_wrapped(outcome.reason)
    show(f"\nChanges of right outputs, which compare should refuse:\n{MEANING}")
    outputs, num_failed = counted(len(outcomes), "output"), sum(outcome.status == "failed" for outcome in outcomes)
    if num_failed:
        show_wrapped(
            f"{num_failed} of {outputs} not checked enough: compare accepts a wrong element, a wrong row or a zeroed tail"
        )
        raise typer.Exit(1)
    show_wrapped(f"passed: compare checks {outputs}; without --mutate the kernels are checked")


_SHOWN = 5
"""Most launches that are named."""


def _show_unchecked(plan: Plan, checked: Sequence[Record], capture: Path) -> None:
    """Name the launches of a capture whose values were not checked, and the kernels that cannot be launched again."""
    from kerneltune.adopt.overview import read_capture

    launches = [sweep_case.case for sweep_case in plan.cases()]
    names = {record.case for record in checked}
    unchecked = [f"{case.name} ({assignments(case.sizes)})" for case in launches if case.name not in names]
    if unchecked:
        count = f"{len(unchecked)} of {counted(len(launches), 'launch', 'launches')}, too large for the interpreter"
        show_wrapped(f"values not checked: {count}: {first_of(unchecked, _SHOWN)}")
    problems = {launch.kernel.text: launch.problem for launch in read_capture(capture).classes if launch.problem}
    for kernel, problem in problems.items():
        show_wrapped(f"not checked: {kernel}: {problem}")
