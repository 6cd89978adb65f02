"""`kerneltune inspect`: show the facts of compiled configs on a machine without a GPU; `gate --static` judges them (`judge`)."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kerneltune.cache import readable
from kerneltune.cli import loading
from kerneltune.cli import options as o
from kerneltune.cli.console import messages, note, show, show_table, show_wrapped, unaccepted
from kerneltune.cli.files import swept_cases
from kerneltune.cli.progress import Reporter
from kerneltune.files import in_checkout
from kerneltune.inspection import static
from kerneltune.inspection.static import StaticRow, Survey
from kerneltune.measuring.assembly import TARGETS
from kerneltune.plan import Selection, cached_runs, default_runs
from kerneltune.records import grouped
from kerneltune.spec import PLUGINS, Case, Op, TaskKey
from kerneltune.task import Run
from kerneltune.wording import assignments, counted

if TYPE_CHECKING:
    from kerneltune.gating.verdict import Verdict

_ALL = "all"
_GPU = "nvidia_h200"
_LEGEND = (
    "regs: registers of a thread. spill, shared: bytes. programs, warps: what an SM holds at once, and the limiter, "
    "which allows no more. loads, stores: 128x4 is four instructions of 128 bits a thread; "
    "atomics and bulk (TMA) copies are not counted."
)
_SHOWN = 40
"""Configs that `--all` lists; the rest is counted."""


def _compiled(runs: Sequence[Run], targets: list[str], workers: int | None) -> Survey:
    """Compile configs, and show a progress bar."""
    from kerneltune.inspection.survey import survey

    with Reporter() as progress:
        return survey(runs, targets, workers, progress)


@o.ungrouped(without=("op",))
def command(
    selection: Selection,
    op: Annotated[str | None, o.argument("[OP]", "Only this operator.")] = None,
    sizes: Annotated[list[str] | None, o.argument("[AXIS=SIZE]...", "This case, like M=8192 N=4096, not cached ones.")] = None,
    target: Annotated[list[str] | None, o.option("--target", "ARCH|all", "Compile for it, like sm_90; may be repeated.")] = None,
    config: Annotated[str | None, o.option("--config", "JSON", "This config, not the cached one.")] = None,
    save: Annotated[Path | None, o.option("--save", "FILE", "Keep what was found, for gate --static.")] = None,
    every: Annotated[
        bool, o.flag("--all", "With OP: every valid config of its cases; list spills and failures. Without: all operators.")
    ] = False,
    gpu: Annotated[str, o.gpu("Cached configs of this GPU, by its folder's name.")] = _GPU,
    workers: o.Workers = None,
    configs: o.Configs = None,
) -> None:
    """Compile OP's cached configs on the CPU; show registers, spills, shared memory, occupancy and access widths.

    Cases of the sweeps without a cached config, and sizes such as M=8192, are compiled with the default configs.

    Registers and spilled bytes are per thread, shared bytes per program; programs and warps are the most that an SM
    holds, with their limiter; loads and stores of global memory are bits x instructions. `gate --static` compares two revisions.
    With --captured and without OP, only the capture's kernels are compiled. Exit code 1 where the config of --config does not
    compile.
    """
    o.read_configs(configs)
    selection = replace(selection, ops=(op,) if op else tuple(loading.captured_ops()))
    targets = _targets(target)
    if save is not None:
        loading.require_writable(save.parent)
    runs = _runs(selection, sizes or [], gpu)
    if not (every or selection.ops or selection.cases):
        compiled = f"{counted(len(runs), 'config')} of all operators for {counted(len(targets), 'target')}"
        raise ValueError(f"op: missing: expected an operator, or --all to compile {compiled}")
    if every and selection.ops:
        o.refuse("not with --all", config=config, save=save)
        tasks = {(task.variant.name, task.case): task for task, _ in runs}.values()
        space = [Run(task, candidate) for task in tasks for candidate in task.variant.configs(task.case)]
        _show_space(_compiled(space, targets, workers).rows)
        return
    survey = _compiled(_with_config(runs, config), targets, workers)
    if save is None:
        _show(survey.rows)
    else:
        static.save(save, replace(survey, gpu=gpu))
        show(f"wrote {save}", messages)
    if config is not None and any(row.error for row in survey.rows):
        raise typer.Exit(1)


def _show_space(rows: Sequence[StaticRow]) -> None:
    """List the configs that do not compile, exceed a limit or spill, the worst first; end with 1 where none compiles.

    An error that all configs and targets of a case share, as of host code that reads values, is listed once.
    """
    noted = list[StaticRow]()
    for first, *others in grouped(rows, lambda row: row.key[:3]).values():
        if others and first.error and all(row.error == first.error for row in others):
            show_wrapped(f"{first.op} {first.variant} {first.case}: every config for every target: {first.error}")
        else:
            noted += [row for row in (first, *others) if row.error or _spilled_bytes(row)]
    noted.sort(key=lambda row: (not row.error, -_spilled_bytes(row)))
    for row in noted[:_SHOWN]:
        reason = row.error or f"spills {_spilled_bytes(row)} bytes a thread"
        show_wrapped(f"{row.label}: {assignments(row.config)}: {reason}")
    if len(noted) > _SHOWN:
        show_wrapped(f"and {len(noted) - _SHOWN} more")
    for target, target_rows in grouped(rows, lambda row: row.target).items():
        failed, spilled = sum(bool(row.error) for row in target_rows), sum(_spilled_bytes(row) > 0 for row in target_rows)
        show_wrapped(f"{target}: {counted(len(target_rows), 'config')}, {failed} fail or exceed a limit, {spilled} spill")
    if all(row.error for row in rows):
        raise typer.Exit(1)


def _spilled_bytes(row: StaticRow) -> int:
    """Return the spilled bytes per thread of the kernel that spills most."""
    return max((kernel.spill_bytes for kernel in row.kernels), default=0)


def judge(
    baseline: str, selection: Selection, target: list[str] | None, workers: int | None, accepted: Sequence[str] = ()
) -> "Verdict":
    """Return the gate's verdict on the cached configs against a file of `--save` or a git revision.

    accepted: texts of findings that do not fail.
    """
    from kerneltune.gating.static_gate import static_gate
    from kerneltune.inspection.revision import changes_since

    refused = partial(unaccepted, accepted=accepted)
    targets = _targets(target)
    if baseline.endswith(".json") or Path(baseline).is_file():
        saved = static.load(Path(baseline))
        targets = _targets(target or [row.target for row in saved.rows])
        rows = tuple(row for row in saved.rows if row.target in targets and (not selection.ops or row.op in selection.ops))
        for name in {row.op for row in rows}:
            o.one_of(f"{baseline}: op", name, loading.load_summaries())
        if not rows:
            raise ValueError(f"{baseline}: no row of {' '.join(selection.ops) or 'any operator'} for {' '.join(targets)}")
        runs = _runs_of_rows(baseline, rows, selection, saved.gpu or _GPU)
        new = _compiled(runs, targets, workers)
        compared = {row.key for row in new.rows}  # a case that was renamed since is compared, too
        selected = tuple(row for row in rows if row.key in compared or _is_selected(row, selection))
        return static_gate(replace(saved, rows=selected), new, refused=refused)
    if not in_checkout() or os.environ.get(PLUGINS) or o.captured():
        raise ValueError(
            f"revision: {baseline!r}: only revisions of kerneltune's checkout are compared, without plug-ins and captures: "
            "there, save the other side by `inspect OP --save FILE`; then `gate FILE --static`"
        )
    runs = _runs(selection, None, _GPU)
    selecting = {"case": selection.cases, "dtype": selection.dtypes, "quant": selection.quants, "target": targets, "gpu": (_GPU,)}
    arguments = [f"--{name}={value}" for name, values in selecting.items() for value in values]
    arguments += [f"--workers={workers}"] if workers else []
    with Reporter() as progress:
        earlier, changed = changes_since(baseline, runs, _GPU, arguments, progress)
    unchanged = len(runs) - len(changed)
    note(f"{unchanged} of {len(runs)} configs run the same code as in {baseline}: not compiled")
    return static_gate(earlier, _compiled(changed, targets, workers), unchanged * len(targets), refused)


def _targets(names: list[str] | None) -> list[str]:
    """Return the given targets, in the order of `TARGETS`; all targets if none is given."""
    for name in names or ():
        o.one_of("target", name, (*TARGETS, _ALL))
    return [name for name in TARGETS if not names or _ALL in names or name in names]


def _is_selected(row: StaticRow, selection: Selection) -> bool:
    name, _, dtype, quant = row.case_parts()
    return selection.matches(TaskKey(row.op, row.variant, Case(name, (), dtype, quant), row.policy))


def _runs_of_rows(file: str, rows: Sequence[StaticRow], selection: Selection, gpu: str) -> list[Run]:
    """Return the selected cached configs of the rows' operators; for an operator without any, the default configs of its rows."""
    ops = loading.load_ops()
    names = {row.op for row in rows}
    uncached = {name for name in names if not cached_runs([ops[name]], gpu)}
    cached = tuple(sorted(names - uncached))
    runs = _runs(replace(selection, ops=cached), None, gpu) if cached else []
    selection.require_names(ops.values())
    for row in {(row.op, row.variant, row.case): row for row in rows if row.op in uncached}.values():
        name, sizes, dtype, quant = row.case_parts()
        op = ops[row.op]
        try:
            case = loading.case_of_sizes(op, sizes, dtype, quant, complete=True)
            one_variant = replace(selection, variants=(op.variant(row.variant).name,))
        except ValueError as error:
            raise ValueError(f"{file}: case: {row.case!r}: {error}") from error
        runs += _selected(default_runs(op, [replace(case, name=name)], one_variant), selection)
    if not runs:
        raise ValueError(f"{file}: no row of this selection")
    return runs


def _runs(selection: Selection, sizes: list[str] | None, gpu: str) -> list[Run]:
    """Return the selected cached configs; for given sizes, or cases of the sweeps without a cached config, default configs.

    sizes: None for the gate, which cannot take sizes.
    """
    selected_ops = _selected_ops(selection)
    if sizes:
        return _sized_runs(selected_ops[0], sizes, selection)  # sizes follow an operator
    folder = str(readable(Path(gpu)))
    runs = cached_runs(selected_ops, gpu)
    selected_runs = _selected(runs, selection)
    if selection.ops and not selected_runs:
        for op in selected_ops:
            runs += default_runs(op, dict.fromkeys(swept_cases(op.name)), selection)
        selected_runs = _selected(runs, selection)
        if selected_runs:
            note(f"{folder} has no config for {' '.join(selection.cases or selection.ops)}: default configs")
    if selected_runs:
        return selected_runs
    for field in ("variant", "dtype", "quant", "case") if runs else ():
        selection.require_match(field, (run.task.key.fields[field] for run in runs))
    owner = f" of {', '.join(selection.ops)}" if selection.ops else ""
    axes = selected_ops[0].axes if selection.ops else ("M",)
    advice = "" if sizes is None else f": name sizes, like {' '.join(f'{axis}=4096' for axis in axes)}"
    raise ValueError(f"nothing to compile: {folder} has no config{owner}{' of this selection' if runs else ''}{advice}")


def _selected_ops(selection: Selection) -> list[Op]:
    """Return the selected operators; raise ValueError for a name that none of them has, and if no variant has knobs."""
    for case in (name for name in selection.cases if "=" in name):
        example = " ".join([*(selection.ops or ("OP",)), *case.split(",")])
        raise ValueError(f"case: {case!r}: expected a case's name; sizes follow OP: {example}")
    ops = loading.load_ops()
    selection.require_names(ops.values())
    selected_ops = [ops[name] for name in selection.ops or ops]
    if not any(v.config for op in selected_ops for v in op.variants if selection.matches_variant(v.name)):
        named = f" of such a name: {', '.join(selection.variants)}" if selection.variants else ""
        raise ValueError(f"nothing to compile: {' '.join(selection.ops)} has no variant with knobs{named}")
    return selected_ops


def _sized_runs(op: Op, sizes: list[str], selection: Selection) -> list[Run]:
    """Return the default configs for given sizes, of the first element type and mode that are selected."""
    if selection.cases:
        raise ValueError(f"case: {selection.cases[0]!r}: expected sizes or --case, one of them")
    case = loading.case_of_sizes(op, sizes, (selection.dtypes or op.dtypes)[0], (selection.quants or op.quants)[0], complete=True)
    runs = _selected(default_runs(op, [case], selection), selection)
    if not runs:
        raise ValueError(f"nothing to compile: {op.name} has no such variant with knobs for {case.label}")
    return runs


def _selected(runs: list[Run], selection: Selection) -> list[Run]:
    return [run for run in runs if selection.matches(run.task.key)]


def _with_config(runs: list[Run], text: str | None) -> list[Run]:
    """Return the tasks of the runs with the config of a JSON text; for None, return the runs."""
    if text is None:
        return runs
    variants = sorted({f"{task.op.name} {task.variant.name}" for task, _ in runs})
    if len(variants) > 1:
        raise ValueError(f"config: {text!r}: expected OP and --variant beside it, for there are {', '.join(variants)}")
    config = o.config_from_json(runs[0].task.variant, "config", text)
    return [run._replace(config=config) for run in runs]


def _show(rows: Sequence[StaticRow]) -> None:
    """Print a table per config and kernel, a line per target."""
    for config_rows in grouped(rows, lambda row: row.key[:-1]).values():
        first = config_rows[0]
        show_wrapped(f"{first.op} {first.variant}  {first.case}{'' if first.policy == 'cold' else ' ' + first.policy}")
        show_wrapped("  " + assignments(first.config))
        for kernel, lines in _tables(config_rows).items():
            show(f"  {kernel}")
            show_table(tuple(lines[0]), [tuple(line.values()) for line in lines])
        for row in config_rows:
            if row.error or not row.kernels:
                show_wrapped(f"  {row.target}: {row.error or 'launches no kernel in this case'}", "    ")
        show("")
    if any(row.kernels for row in rows):
        show_wrapped(_LEGEND, "")


def _tables(config_rows: list[StaticRow]) -> dict[str, list[dict[str, str]]]:
    """Return kernel -> its lines; a second launch of a kernel with other resources is a kernel of its own."""
    tables: dict[str, list[dict[str, str]]] = {}
    for row in config_rows:
        for (name, nth), kernel in static.numbered(row.kernels).items():
            tables.setdefault(f"{name} ({nth + 1})" if nth else name, []).append(static.facts(kernel, row.target))
    return tables
