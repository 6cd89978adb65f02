"""`kerneltune inspect`: what compiling alone says of configs, on a machine without a GPU; and what `gate --static` does."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import error_line, note, show, show_table, show_wrapped
from kerneltune.cli.files import swept
from kerneltune.cli.progress import reporter
from kerneltune.errors import unknown
from kerneltune.files import data_root
from kerneltune.spec import Case, Op, Variant
from kerneltune.table import counted, pairs

if TYPE_CHECKING:
    from kerneltune.inspection.static import StaticRow, Survey
    from kerneltune.run_options import Selection
    from kerneltune.search.task import Run

_ALL = "all"
_GPU = "nvidia_h200"
_LEGEND = (
    "regs: registers of a thread. spill, shared: bytes. programs, warps: what an SM holds at once, and the limiter, "
    "which allows no more. loads, stores: 128x4 is four instructions of 128 bits a thread; "
    "atomics and bulk (TMA) copies are not counted."
)
_HEAD = ("target", "regs", "spill", "shared", "programs", "warps", "limiter", "loads", "stores")


@o.selects("op")
def command(
    wanted: "Selection",
    op: Annotated[str | None, typer.Argument(metavar="[OP]", help="Only this operator.")] = None,
    sizes: Annotated[
        list[str] | None, typer.Argument(metavar="[AXIS=SIZE]...", help="This case, like M=8192 N=4096, not the cached ones.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option("--target", metavar="ARCH|all", help="Compile for it, like sm_90; may be repeated.")
    ] = None,
    config: Annotated[str | None, typer.Option("--config", metavar="JSON", help="This config, not the cached one.")] = None,
    against: Annotated[str | None, typer.Option("--against", metavar="JSON", help="Show what differs with this config.")] = None,
    against_rev: Annotated[
        str | None, typer.Option("--against-rev", metavar="REV", help="Show what differs from a git revision and its configs.")
    ] = None,
    save: Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Keep what was found, for gate --static.")] = None,
    recompile: Annotated[bool, typer.Option("--recompile", help="Compile all kernels again.")] = False,
    renew: Annotated[
        bool, typer.Option("--renew", help="Write what was found to results/static, which the package ships.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--all", help="Compile every valid config of OP's cases; list spills and failures.")
    ] = False,
    gpu: Annotated[str, typer.Option("--gpu", metavar="NAME", help="Cached configs of this GPU, by its folder's name.")] = _GPU,
    workers: o.Workers = None,
    configs: o.Configs = None,
) -> None:
    """Compile the cached configs on the CPU; show registers, spills, shared memory, occupancy and access widths.

    Cases of the sweeps without a cached config, and sizes such as M=8192, are compiled with the default configs.

    Registers and spilled bytes are per thread, shared bytes per program; programs and warps are the most that an SM
    holds, with their limiter; loads and stores of global memory are bits x instructions. `gate --static` compares two revisions.
    Kernels that results/static knows, by a digest of Triton's own IR, are not compiled further.
    With --captured and without OP, only the capture's kernels are compiled. Exit code 1 where the config of --config or
    --against does not compile.
    """
    _require_one_side(against, against_rev)
    captured = tuple(o.captured_ops())
    wanted = replace(wanted, ops=(op,) if op else captured)
    _require_names(wanted.cases, op or "OP")
    whole = gpu == _GPU and _is_whole(configs, wanted, target, config, against, against_rev)
    if renew and not whole:
        raise ValueError("renew: True: expected with all of the package's configs, for it takes the place of what is shipped")
    targets = _targets(target)
    any_case = every or config is not None or bool(wanted.cases or captured)
    runs = _runs(wanted, sizes, gpu, configs, any_case=any_case)
    if every:
        o.refuse("not with --all", config=config, against=against, against_rev=against_rev, save=save, renew=renew)
        _show_space(_survey(_whole_space(runs, op), targets, workers, recompile))
        return
    if config is not None:
        runs = _with_config(runs, "config", config)
    arguments = _again(wanted, sizes, recompile, target=targets, config=config, gpu=gpu, workers=workers)
    earlier = None if against_rev is None else _of_revision(against_rev, arguments)
    found = _survey(runs, targets, workers, recompile)
    if against is not None:
        earlier = _survey(_with_config(runs, "against", against), targets, workers, recompile)
    if renew:
        _ship(found)
    elif whole:
        _say_unknown(found)
    if save is not None:
        from kerneltune.inspection.static import save as save_survey

        save_survey(save, found)
        note(f"wrote {save}")
    if earlier is not None:
        _show_differences(*((found, earlier) if against is not None else (earlier, found)))
    elif save is None and not renew:
        _show(found)
    _end(found, *filter(None, [earlier]), is_given=config is not None or against is not None)


def _require_one_side(against: str | None, against_rev: str | None) -> None:
    """Raise ValueError where a config and a revision are given to compare with."""
    if against is not None and against_rev is not None:
        raise ValueError("--against and --against-rev: expected one of them")


_SHOWN = 40
"""Configs that `--all` lists; it counts the others."""


def _whole_space(runs: "list[Run]", op: str | None) -> "list[Run]":
    """Return every valid config of each task of some runs."""
    if op is None:
        raise ValueError("all: True: expected OP beside it: all spaces together are tens of thousands of configs")
    tasks = {(task.variant.name, task.case): task for task, _ in runs}
    return [(task, config) for task in tasks.values() for config in task.variant.configs(task.case)]


def _show_space(found: "Survey") -> None:
    """List the configs that do not compile, exceed a limit or spill, the worst first; end with 1 where none compiles."""
    spills = {id(row): max((kernel.spill_bytes for kernel in row.kernels), default=0) for row in found.rows}
    noted = sorted((row for row in found.rows if row.error or spills[id(row)]), key=lambda row: (not row.error, -spills[id(row)]))
    for row in noted[:_SHOWN]:
        reason = row.error or f"spills {spills[id(row)]} bytes a thread"
        show_wrapped(f"{row.label}: {pairs(row.config)}: {reason}")
    if len(noted) > _SHOWN:
        show_wrapped(f"and {len(noted) - _SHOWN} more")
    for target in dict.fromkeys(row.target for row in found.rows):
        rows = [row for row in found.rows if row.target == target]
        failed, spilled = sum(bool(row.error) for row in rows), sum(spills[id(row)] > 0 for row in rows)
        show_wrapped(f"{target}: {counted(len(rows), 'config')}, {failed} fail or exceed a limit, {spilled} spill")
    if all(row.error for row in found.rows):
        raise typer.Exit(1)


def _end(*found: "Survey", is_given: bool) -> None:
    """End the command with exit code 1 where a config that was given does not compile."""
    if is_given and any(row.error for survey in found for row in survey.rows):
        raise typer.Exit(1)


def _require_names(cases: Sequence[str], op: str) -> None:
    """Raise ValueError for a case that is sizes, not a name."""
    for case in cases:
        if "=" in case:
            raise ValueError(f"case: {case!r}: expected a case's name; sizes follow OP: {' '.join([op, *case.split(',')])}")


def judge(
    baseline: str,
    wanted: "Selection",
    target: list[str] | None,
    workers: int | None,
    recompile: bool,
    configs: Path | None,
) -> NoReturn:
    """Gate the cached configs against a file of `--save` or a git revision; end the command with the gate's exit code."""
    from kerneltune.inspection.static import load, static_gate

    targets = _targets(target)
    runs = _runs(wanted, None, _GPU, configs, any_case=False)
    unchanged = 0
    if baseline.endswith(".json") or Path(baseline).is_file():
        earlier, found = load(Path(baseline)), _survey(runs, targets, workers, recompile)
    elif recompile:
        earlier = _of_revision(baseline, _again(wanted, None, recompile, target=targets, gpu=_GPU, workers=workers))
        found = _survey(runs, targets, workers, recompile)
    else:
        earlier, found, unchanged = _changed(baseline, wanted, runs, targets, workers)
    if _is_whole(configs, wanted, target):
        _say_unknown(found)
    verdict = static_gate(earlier, found, unchanged)
    for line in verdict.findings:
        show(line)
    (error_line if verdict.exit_code == 2 else show)(verdict.summary)
    raise typer.Exit(verdict.exit_code)


def _survey(runs: "Sequence[Run]", targets: list[str], workers: int | None, recompile: bool) -> "Survey":
    """Compile configs, with a bar while that runs."""
    from kerneltune.inspection.survey import survey
    from kerneltune.measuring import inspected

    before = {} if recompile else {target: inspected.load(inspected.shipped(), target) for target in targets}
    if any(found.refused for found in before.values()):
        note("results/static is left out, for other code read the compiler: `kerneltune inspect --renew` writes it anew")
    with reporter() as progress:
        return survey(runs, targets, workers, progress.stage, progress.advance, before)


def _changed(
    revision: str, wanted: "Selection", runs: "list[Run]", targets: list[str], workers: int | None
) -> "tuple[Survey, Survey, int]":
    """Return the rows that differ, of the revision and here, and the number of rows that need not be compiled."""
    from kerneltune.inspection.changes import changes_since

    def arguments_of(op: str, variant: str) -> list[str]:
        of_variant = replace(wanted, ops=(op,), variants=(variant,))
        return _again(of_variant, None, False, target=targets, gpu=_GPU, workers=workers)

    with reporter() as progress:
        changes = changes_since(revision, runs, _GPU, arguments_of, progress)
    note(f"{changes.unchanged} of {len(runs)} configs run the same code as in {revision}: not compiled")
    return changes.earlier, _survey(changes.runs, targets, workers, False), changes.unchanged * len(targets)


def _is_whole(configs: Path | None, wanted: "Selection", *narrowing: object) -> bool:
    """Return whether exactly the configs of the package are compiled, as for results/static."""
    everything = replace(wanted, ops=(), cases=(), dtypes=(), quants=(), variants=())
    return wanted == everything and not any(narrowing) and o.configs_root(configs) == data_root("configs")


def _ship(found: "Survey") -> None:
    """Make results/static hold exactly the kernels of the survey."""
    from kerneltune.measuring import inspected

    for target, facts in found.facts.items():
        inspected.save(inspected.shipped(), target, facts)
    note(f"wrote {inspected.shipped()}")


def _say_unknown(found: "Survey") -> None:
    if found.unknown:
        kernels = sum(map(len, found.facts.values()))
        note(f"{found.unknown} of {kernels} kernels are not in results/static: `kerneltune inspect --renew` puts them there")


def _targets(given: list[str] | None) -> list[str]:
    """Return the targets asked for, in the order of the table; all targets if none is asked for."""
    from kerneltune.measuring.assembly import LIMITS

    for name in given or ():
        o.choice("target", name, (*LIMITS, _ALL))
    return [name for name in LIMITS if not given or _ALL in given or name in given]


def _runs(wanted: "Selection", sizes: list[str] | None, gpu: str, configs: Path | None, any_case: bool) -> "list[Run]":
    """Select cached configs; else, for an operator's cases in the sweeps or of given sizes, the default configs."""
    from kerneltune.cache import readable
    from kerneltune.inspection.survey import cached_runs, default_runs

    known = o.load_ops()
    selection = o.make_selection(known, "inspect", wanted)
    chosen: list[Op] = [known[name] for name in selection.ops or known]
    if not any(variant.config for each in chosen for variant in each.variants if selection.takes_variant(variant.name)):
        named = f" of such a name: {', '.join(wanted.variants)}" if wanted.variants else ""
        raise ValueError(f"nothing to compile: {' '.join(selection.ops)} has no variant with knobs{named}")

    def asked(variant: Variant) -> bool:
        return selection.takes_variant(variant.name) if wanted.variants else not variant.is_peer

    def selected(runs: "Iterable[Run]") -> "list[Run]":
        return [
            (task, config)
            for task, config in runs
            if selection.takes_variant(task.variant.name)
            and selection.covers(task.op.name, task.case.name, task.case.dtype, task.case.quant)
        ]

    if sizes:
        if wanted.cases:
            raise ValueError(f"case: {wanted.cases[0]!r}: expected sizes or --case, one of them")
        first = chosen[0]  # sizes follow an operator
        case = o.case_of_sizes(first, sizes, (wanted.dtypes or first.dtypes)[0], (wanted.quants or first.quants)[0], whole=True)
        found = selected(default_runs(first, [case], asked))
        if not found:
            raise ValueError(f"nothing to compile: {first.name} has no such variant with knobs for {case.label}")
        return found
    place = str(readable(Path(gpu), configs))
    found = selected(cached_runs(chosen, configs, gpu))
    cases: list[Case] = []
    if wanted.ops and not found and any_case:
        of_op = _swept_cases(known, chosen)
        cases = [case for cases_of in of_op.values() for case in cases_of]
        found = selected(run for name, of in of_op.items() for run in default_runs(known[name], of, asked))
        if found and wanted.cases:
            note(f"{place} has no config for {' '.join(wanted.cases)}: default configs")
    if not found:
        raise _nothing(cached_runs(chosen, configs, gpu), selection, place, [case.name for case in cases])
    return found


def _swept_cases(known: "Mapping[str, Op]", chosen: "Sequence[Op]") -> dict[str, list[Case]]:
    """Return the cases of operators in the sweeps, by operator."""
    found: dict[str, dict[Case, None]] = {op.name: {} for op in chosen}
    for entry in swept(known):
        found.get(entry.op, {})[entry.case] = None
    return {name: list(cases) for name, cases in found.items()}


def _nothing(cached: "Iterable[Run]", selection: "Selection", place: str, cases: list[str]) -> ValueError:
    """Return the error of a selection without configs: it names the first option that leaves none, and the known values.

    Args:
        cases: names of the operator's cases in sweeps, which are selected as well.
    """
    left = list(cached)
    if not left and not cases:
        of = f" of {', '.join(selection.ops)}" if selection.ops else ""
        return ValueError(f"nothing to compile: {place} has no config{of}: name sizes, like M=4096")
    fields: dict[str, tuple[tuple[str, ...], Callable[[Run], str]]] = {
        "variant": (selection.variants, lambda run: run[0].variant.name),
        "dtype": (selection.dtypes, lambda run: run[0].case.dtype),
        "quant": (selection.quants, lambda run: run[0].case.quant),
        "case": (selection.cases, lambda run: run[0].case.name),
    }
    for field, (patterns, get) in fields.items():
        present = dict.fromkeys([*map(get, left), *(cases if field == "case" else [])])
        left = [r for r in left if not patterns or any(fnmatch.fnmatch(get(r), pattern) for pattern in patterns)]
        if not left:
            also = " and of the sweeps" if field == "case" and cases else ""
            return unknown(field, " ".join(patterns), present, f" of the cached configs in {place}{also}, or sizes, like M=4096")
    return ValueError(f"nothing to compile: {place} has no such config")


def _with_config(runs: "list[Run]", field: str, text: str) -> "list[Run]":
    """Give the tasks of the runs the config of a JSON text."""
    variants = sorted({f"{task.op.name} {task.variant.name}" for task, _ in runs})
    if len(variants) > 1:
        raise ValueError(f"{field}: {text!r}: expected OP and --variant beside it, for there are {', '.join(variants)}")
    config = o.config_of(runs[0][0].variant, field, text)
    return [(task, config) for task, _ in runs]


def _again(wanted: "Selection", sizes: list[str] | None, recompile: bool, **given: Any) -> list[str]:
    """Return the arguments with which another revision does the same."""
    arguments = [*wanted.ops, *(sizes or ()), *(["--recompile"] if recompile else [])]
    selecting = {"variant": wanted.variants, "case": wanted.cases, "dtype": wanted.dtypes, "quant": wanted.quants}
    for name, value in {**selecting, **given}.items():
        for item in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            arguments += [f"--{name}", str(item)]
    return arguments


def _of_revision(name: str, arguments: list[str]) -> "Survey":
    """Compile a git revision's own configs."""
    from kerneltune.inspection.revision import survey_revision

    note(f"compiling revision {name}")
    return survey_revision(name, arguments)


def _show(found: "Survey") -> None:
    """Make a table per config and kernel, a line per target."""
    from kerneltune.records import grouped

    for same in grouped(found.rows, lambda row: row.key[:-1]).values():
        first = same[0]
        show_wrapped(f"{first.op} {first.variant}  {first.case}{'' if first.policy == 'cold' else ' ' + first.policy}")
        show_wrapped("  " + pairs(first.config))
        for kernel, lines in _tables(same).items():
            show(f"  {kernel}")
            show_table(_HEAD, lines)
        for row in same:
            if row.error:
                show(f"  {row.target}: {row.error}")
        show("")
    if any(row.kernels for row in found.rows):
        show_wrapped(_LEGEND, "")


def _tables(same: "list[StaticRow]") -> dict[str, list[tuple[str, ...]]]:
    """Collect the lines of every kernel; a second launch of a kernel with other resources is a kernel of its own."""
    from kerneltune.inspection.static import numbered, widths
    from kerneltune.measuring.assembly import resident

    tables: dict[str, list[tuple[str, ...]]] = {}
    for row in same:
        for (name, nth), kernel in numbered(row.kernels).items():
            held = resident(kernel, row.target)
            numbers = map(str, (kernel.registers, kernel.spill_bytes, kernel.shared_bytes, held.programs))
            accesses = (widths(kernel.accesses, "load"), widths(kernel.accesses, "store"))
            line = (row.target, *numbers, f"{held.warps}/{held.of_warps}", held.limiter, *accesses)
            tables.setdefault(f"{name} ({nth + 1})" if nth else name, []).append(line)
    return tables


def _show_differences(old: "Survey", new: "Survey") -> None:
    from kerneltune.inspection.static import differences

    before = {row.key: row for row in old.rows}
    compared = [(before[row.key], row) for row in new.rows if row.key in before]
    if not compared:
        raise ValueError("nothing compared: the two have no config of one case, variant and target in common")
    lines = [(f"{a.op} {a.variant} {a.case}", (a.target, *line)) for a, b in compared for line in differences(a, b)]
    for title in dict.fromkeys(title for title, _ in lines):
        show_wrapped(title)
        show_table(("target", "kernel", "what", "A", "B"), [line for other, line in lines if other == title])
        show("")
    changed = len({(title, line[0]) for title, line in lines})
    show(f"{changed} of {len(compared)} configs differ" if lines else f"no difference in {counted(len(compared), 'config')}")
