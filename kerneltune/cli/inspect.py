"""`kerneltune inspect`: show the facts of compiled configs on a machine without a GPU; `gate --static` judges them (`judge`)."""

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
_SHOWN = 40
"""Configs that `--all` lists; the rest is counted."""


@dataclass(frozen=True, slots=True)
class _Compiling:
    """Compile configs for some targets, with a number of processes; `recompile` compiles known kernels again."""

    targets: list[str]
    workers: int | None
    recompile: bool

    def survey(self, runs: "Sequence[Run]") -> "Survey":
        """Compile configs, and show a progress bar."""
        from kerneltune.inspection.survey import survey
        from kerneltune.measuring import inspected

        known = {} if self.recompile else {target: inspected.load(inspected.shipped(), target) for target in self.targets}
        if any(found.refused for found in known.values()):
            note("results/static is left out, for other code read the compiler: `kerneltune inspect --renew` writes it anew")
        with reporter() as progress:
            return survey(runs, self.targets, self.workers, progress, known)

    def survey_revision(self, name: str, wanted: "Selection", sizes: Sequence[str] = (), **given: Any) -> "Survey":
        """Compile a git revision's own configs."""
        from kerneltune.inspection.revision import survey_revision

        note(f"compiling revision {name}")
        return survey_revision(name, self.arguments(wanted, sizes, **given))

    def arguments(self, wanted: "Selection", sizes: Sequence[str] = (), **given: Any) -> list[str]:
        """Return the arguments of this command for `inspect` of another revision."""
        arguments = [*wanted.ops, *sizes, *(["--recompile"] if self.recompile else [])]
        selecting = {"variant": wanted.variants, "case": wanted.cases, "dtype": wanted.dtypes, "quant": wanted.quants}
        for name, value in {**selecting, "target": self.targets, **given, "workers": self.workers}.items():
            for item in value if isinstance(value, list | tuple) else [] if value is None else [value]:
                arguments += [f"--{name}", str(item)]
        return arguments


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
    _check_given(wanted, op, against, against_rev)
    captured = tuple(o.captured_ops())
    wanted = replace(wanted, ops=(op,) if op else captured)
    whole = gpu == _GPU and _is_whole(configs, wanted, target, config, against, against_rev)
    if renew and not whole:
        raise ValueError("renew: True: expected with all of the package's configs, for it takes the place of what is shipped")
    compiling = _Compiling(_targets(target), workers, recompile)
    any_case = every or config is not None or bool(wanted.cases or captured)
    runs = _runs(wanted, sizes, gpu, configs, any_case)
    if every:
        o.refuse("not with --all", config=config, against=against, against_rev=against_rev, save=save, renew=renew)
        _show_space(compiling.survey(_whole_space(runs, op)))
        return
    if config is not None:
        runs = _with_config(runs, "config", config)
    earlier = None
    if against_rev is not None:
        earlier = compiling.survey_revision(against_rev, wanted, sizes or (), config=config, gpu=gpu)
    found = compiling.survey(runs)
    if against is not None:
        earlier = compiling.survey(_with_config(runs, "against", against))
    if whole:
        _compare_with_shipped(found, renew)
    _deliver(found, earlier, save, is_flipped=against is not None, is_shown=save is None and not renew)
    surveys = (found, earlier) if earlier is not None else (found,)
    if (config is not None or against is not None) and any(row.error for survey in surveys for row in survey.rows):
        raise typer.Exit(1)


def _check_given(wanted: "Selection", op: str | None, against: str | None, against_rev: str | None) -> None:
    """Raise ValueError where a config and a revision are given to compare with, or a case is sizes, not a name."""
    if against is not None and against_rev is not None:
        raise ValueError("--against and --against-rev: expected one of them")
    for case in wanted.cases:
        if "=" in case:
            place = " ".join([op or "OP", *case.split(",")])
            raise ValueError(f"case: {case!r}: expected a case's name; sizes follow OP: {place}")


def _deliver(found: "Survey", earlier: "Survey | None", save: Path | None, *, is_flipped: bool, is_shown: bool) -> None:
    """Save a survey; show its differences from an earlier survey, which is B where `is_flipped`, or its rows."""
    if save is not None:
        from kerneltune.inspection.static import save as save_survey

        save_survey(save, found)
        note(f"wrote {save}")
    if earlier is not None:
        _show_differences(*((found, earlier) if is_flipped else (earlier, found)))
    elif is_shown:
        _show(found)


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


def judge(
    baseline: str, wanted: "Selection", target: list[str] | None, workers: int | None, recompile: bool, configs: Path | None
) -> NoReturn:
    """Gate the cached configs against a file of `--save` or a git revision; end the command with the gate's exit code."""
    from kerneltune.inspection.static import load, static_gate

    compiling = _Compiling(_targets(target), workers, recompile)
    runs = _runs(wanted, None, _GPU, configs, any_case=False)
    unchanged = 0
    if baseline.endswith(".json") or Path(baseline).is_file():
        earlier, found = load(Path(baseline)), compiling.survey(runs)
    elif recompile:
        earlier, found = compiling.survey_revision(baseline, wanted, gpu=_GPU), compiling.survey(runs)
    else:
        from kerneltune.inspection.changes import changes_since

        def arguments_of(op: str, variant: str) -> list[str]:
            return compiling.arguments(replace(wanted, ops=(op,), variants=(variant,)), gpu=_GPU)

        with reporter() as progress:
            changes = changes_since(baseline, runs, _GPU, arguments_of, progress)
        note(f"{changes.unchanged} of {len(runs)} configs run the same code as in {baseline}: not compiled")
        earlier, found = changes.earlier, compiling.survey(changes.runs)
        unchanged = changes.unchanged * len(compiling.targets)
    if _is_whole(configs, wanted, target):
        _compare_with_shipped(found, False)
    verdict = static_gate(earlier, found, unchanged)
    for line in verdict.findings:
        show(line)
    (error_line if verdict.exit_code == 2 else show)(verdict.summary)
    raise typer.Exit(verdict.exit_code)


def _is_whole(configs: Path | None, wanted: "Selection", *narrowing: object) -> bool:
    """Return whether exactly the configs of the package are compiled, as for results/static."""
    everything = replace(wanted, ops=(), cases=(), dtypes=(), quants=(), variants=())
    return wanted == everything and not any(narrowing) and o.configs_root(configs) == data_root("configs")


def _compare_with_shipped(found: "Survey", is_renewed: bool) -> None:
    """Write the kernels of a survey of all configs to results/static, or print how many kernels results/static lacks."""
    from kerneltune.measuring import inspected

    if is_renewed:
        for target, facts in found.facts.items():
            inspected.save(inspected.shipped(), target, facts)
        note(f"wrote {inspected.shipped()}")
    elif found.unknown:
        kernels = sum(map(len, found.facts.values()))
        note(f"{found.unknown} of {kernels} kernels are not in results/static: `kerneltune inspect --renew` puts them there")


def _targets(given: list[str] | None) -> list[str]:
    """Return the given targets, in the order of `LIMITS`; all targets if none is given."""
    from kerneltune.measuring.assembly import LIMITS

    for name in given or ():
        o.choice("target", name, (*LIMITS, _ALL))
    return [name for name in LIMITS if not given or _ALL in given or name in given]


def _runs(wanted: "Selection", sizes: list[str] | None, gpu: str, configs: Path | None, any_case: bool) -> "list[Run]":
    """Return the selected cached configs; for given sizes, or cases of the sweeps without a cached config, default configs."""
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
        first = chosen[0]  # sizes follow an operator
        case = _sized_case(first, sizes, wanted)
        found = selected(default_runs(first, [case], asked))
        if not found:
            raise ValueError(f"nothing to compile: {first.name} has no such variant with knobs for {case.label}")
        return found
    place = str(readable(Path(gpu), configs))
    cached = cached_runs(chosen, configs, gpu)
    found = selected(cached)
    in_sweeps: list[Case] = []
    if wanted.ops and not found and any_case:
        for op in chosen:
            cases = list(dict.fromkeys(entry.case for entry in swept(known) if entry.op == op.name))
            in_sweeps += cases
            found += selected(default_runs(op, cases, asked))
        if found and wanted.cases:
            note(f"{place} has no config for {' '.join(wanted.cases)}: default configs")
    if not found:
        raise _nothing(cached, selection, place, [case.name for case in in_sweeps])
    return found


def _sized_case(op: Op, sizes: list[str], wanted: "Selection") -> Case:
    """Return the case of given sizes, of the first element type and mode that are selected."""
    if wanted.cases:
        raise ValueError(f"case: {wanted.cases[0]!r}: expected sizes or --case, one of them")
    return o.case_of_sizes(op, sizes, (wanted.dtypes or op.dtypes)[0], (wanted.quants or op.quants)[0], whole=True)


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
    """Return the tasks of the runs with the config of a JSON text."""
    variants = sorted({f"{task.op.name} {task.variant.name}" for task, _ in runs})
    if len(variants) > 1:
        raise ValueError(f"{field}: {text!r}: expected OP and --variant beside it, for there are {', '.join(variants)}")
    config = o.config_of(runs[0][0].variant, field, text)
    return [(task, config) for task, _ in runs]


def _show(found: "Survey") -> None:
    """Print a table per config and kernel, a line per target."""
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
    """Return kernel -> its lines; a second launch of a kernel with other resources is a kernel of its own."""
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
