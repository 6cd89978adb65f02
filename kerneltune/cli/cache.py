"""`kerneltune cache`: show, check and exchange the configs of the cache."""

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Annotated, Any, assert_never

import typer

from kerneltune import cache, device, misses, sweep_file
from kerneltune.cache import CacheEntry, Choice, Chooser, Source, load, load_strict
from kerneltune.cli import loading
from kerneltune.cli import options as o
from kerneltune.cli.console import deliver, messages, note, show, show_wrapped, width
from kerneltune.cli.files import bench_case, selected
from kerneltune.errors import unknown
from kerneltune.files import replace_text
from kerneltune.nearness import NO_BANDS, band_of
from kerneltune.plan import Selection
from kerneltune.spec import Case, Op
from kerneltune.table import Column, Row, Table
from kerneltune.task import is_stale, knobs_of
from kerneltune.wording import assignments, counted

_GPU = Column("gpu", shared=True)

app = typer.Typer(no_args_is_help=True, help="Show, check and exchange the cached configs.")


@app.command("list")
def list_(configs: o.Configs = None) -> None:
    """Show one line per GPU and operator."""
    o.read_configs(configs)
    rows = []
    for path in loading.config_files():
        entries = load(path.stem, path.parent.name, path.parent.parent)
        variants = ", ".join(sorted({entry.variant for entry in entries}))
        latest = max((str(entry.evidence.get("date", "")) for entry in entries), default="")
        rows.append(Row((path.parent.name, path.stem, len(entries), variants, latest[:10])))
    if rows:
        columns = (_GPU, Column("op"), Column("entries", digits=0), Column("variants", wraps=True), Column("latest"))
        show(Table(columns, tuple(rows)).text(width()))
    else:
        show(f"no entries in {cache.default_root()}")


@app.command("show")
@o.ungrouped(without=("op",))
def show_(op: o.OpName, selection: Selection, gpu: o.Gpu = None, configs: o.Configs = None) -> None:
    """Show the cached configs of an operator."""
    o.read_configs(configs)
    files = _chosen(op, gpu)
    entries = [(path.parent.name, entry) for path in files for entry in load(op, path.parent.name, path.parent.parent)]
    rows = []
    for where, entry in selected(entries, selection, lambda stored: stored[1].key):
        case = entry.case
        shown = " ".join([case.name, assignments(dict((*case.axes, *case.options))), case.dtype, case.quant])
        speedup = entry.evidence.get("speedup")
        gain = float(speedup) if isinstance(speedup, float | int) else None
        rows.append(Row((where, entry.policy, entry.variant, shown, assignments(entry.config), gain)))
    if not rows:
        raise ValueError(f"no entry of {op} of this selection in {cache.default_root()}")
    columns = (
        _GPU,
        Column("policy", shared=True),
        Column("variant", shared=True),
        Column("case", wraps=True),
        Column("config", wraps=True),
        Column("speedup", digits=2, suffix="x"),
    )
    show(Table(columns, tuple(rows)).text(width()))


@app.command()
def explain(
    op: o.OpName,
    case: Annotated[list[str], o.argument("CASE...", "A bench case by name, or sizes and options such as M=8192 N=3584.")],
    gpu: o.Gpu = None,
    variant: o.VariantName = "optimized",
    dtype: o.Dtype = None,
    quant: o.Quant = None,
    configs: o.Configs = None,
) -> None:
    """Show the config that a call without `config=` takes for a case, and its source."""
    o.read_configs(configs)
    operator = loading.load_op(op)
    chosen_variant = operator.variant(variant)
    if chosen_variant.config is None:
        raise ValueError(f"variant: {variant!r}: expected a variant with knobs")
    folder, text = _gpu(gpu), ",".join(case)
    if "=" in text:
        named_case = loading.case_of_sizes(operator, text.split(","), dtype, quant, complete=True)
    else:
        named_case = bench_case(operator, text, dtype, quant)
    called = operator.case_of_call(named_case)
    reason = chosen_variant.unsupported(called)
    if reason is not None:
        raise ValueError(f"case: {called.label}: unsupported: {reason}")
    chooser = cache.Chooser.of(operator, chosen_variant)
    choice = chooser.find(called, folder)
    config, source = assignments(knobs_of(choice.config)), _source(chooser, choice, called, folder)
    for word, line in (("case", called.label), ("config", config), ("from", source)):
        show_wrapped(f"{word:<10}{line}", " " * 10)


def _source(chooser: Chooser, choice: Choice, case: Case, gpu: str) -> str:
    """Return where the config of a case comes from: an entry of the cache, a near entry, or the default, and why."""
    if choice.source is Source.near:
        return f"the cache's nearest entry, {choice.describe().partition(': ')[0]}"
    if choice.source is Source.own:
        own, now = chooser.own(case, gpu), chooser.variant.source_hash
        assert own is not None
        then = own.entry.evidence.get("source_hash") or "unknown"
        stale = f"; stale: source_hash {then} is now {now}" if is_stale(chooser.variant, own.entry) else ""
        return f"the cache's entry for exactly this case{stale}"
    if choice.source is not Source.default:
        assert_never(choice.source)
    if cache.path_of(chooser.op.name, gpu).exists():
        return f"the default: {gpu} has no entry for this case or near it{_limit(chooser, case, gpu)}"
    cause = "no other GPU's serves this case"
    if not device.arch_of(gpu):
        known_gpus = ", ".join(device.ARCHITECTURES)
        cause = f"its architecture is unknown here, so that a call there may take another GPU's config (known: {known_gpus})"
    return f"the default: {gpu} has no config of {chooser.op.name}, and {cause}"


def _limit(chooser: Chooser, case: Case, gpu: str) -> str:
    """Return the limit that keeps entries of other sizes from a case, its band or the distance; empty without free axes."""
    op = chooser.op
    if any(dataclasses.replace(chooser, op=dataclasses.replace(op, bands=NO_BANDS)).matches(case, gpu, op.max_distance)):
        return f", as the case's band is {' and '.join(_band(axis, ends, case[axis]) for axis, ends in op.bands.items())}"
    return f", at most {op.max_distance:g} away in log2 of {' and '.join(op.free_axes)}" if op.free_axes else ""


def _band(axis: str, ends: tuple[int, ...], size: int) -> str:
    """Return the band that contains a size: `N from 17 to 32`."""
    band = band_of(ends, size)
    return f"{axis} from {ends[band - 1] + 1 if band else 0}" + (f" to {ends[band]}" if band < len(ends) else "")


def _gpu(gpu: str | None) -> str:
    """Return the folder of a GPU: the given GPU, which may have no configs, this machine's, or the only folder."""
    if gpu is not None:
        return gpu
    this_gpu = device.current()
    if this_gpu.is_gpu:
        return this_gpu.slug
    folders = sorted({path.parent.name for path in loading.config_files()})
    if len(folders) != 1:
        raise ValueError(f"gpu: not given: expected one of {', '.join(folders or device.ARCHITECTURES)}")
    return folders[0]


@app.command("from-misses")
def from_misses(
    log: Annotated[Path, typer.Argument(metavar="LOG", envvar="KERNELTUNE_LOG_MISSES", help="Where misses were logged.")],
    output: o.Output = None,
) -> None:
    """Write a sweep file of the cases that were looked up and not found, for `kerneltune tune`."""
    cases = [sweep_file.SweepCase(miss.op, miss.case) for miss in misses.read(log)]
    deliver(sweep_file.sweep_text("Cases that were looked up and not found.", "misses", {"bench": cases}), output)


@app.command("export")
def export_(
    op: o.OpName,
    folder: Annotated[Path, o.argument("DIR", "Where the files go.")],
    format_: Annotated[str, o.pick("--format", ("triton", "python", "json"), "What to write.")] = "python",
    gpu: o.Gpu = None,
    variant: o.VariantName = "optimized",
    configs: o.Configs = None,
) -> None:
    """Write cached configs for other programs.

    triton: a module whose configs() and KEY are arguments of @triton.autotune. A knob gets the name of a kernel's argument
    that differs from it in capitals alone; a line names the other knobs and the axes of no argument: map them in NAMES and KEY.
    python: a module without dependencies that finds the best config of a case. json: tables by size.
    """
    o.read_configs(configs)
    from kerneltune import exchange

    operator = loading.load_op(op)
    if all(offered.config is None for offered in operator.variants):
        raise ValueError(f"op: {op!r}: expected an operator with configs: no variant of {op} has knobs")
    files = _chosen(op, gpu)
    if len(files) > 1:
        raise ValueError(f"gpu: not given: expected one of {', '.join(path.parent.name for path in files)}")
    path = files[0]
    stored = load_strict(path)
    o.one_of(f"{path}: variant", variant, dict.fromkeys(entry.variant for entry in stored))
    entries = [entry for entry in stored if entry.variant == variant]
    if operator.kind == "captured" and (format_ != "triton" or "candidate" in entries[0].config):
        raise ValueError(f"format: {format_!r}: {op} is of a capture: ship the capture's folder served instead")
    names = _author_names(operator, variant)
    texts = exchange.WRITERS[format_](operator, path.parent.name, entries, names)
    for name, text in texts.items():
        exchange.require_replaceable(folder / name, text)
        replace_text(folder / name, text)
    first_file = folder / next(iter(texts))
    show(f"wrote {len(texts)} files to {folder}" if len(texts) > 1 else f"wrote {first_file}", messages)
    for line in exchange.unnamed(operator, entries, names) if format_ == "triton" else ():
        note(f"{first_file}: {line}")


def _author_names(op: Op, variant: str) -> dict[str, str]:
    """Return knob or axis -> the argument of a kernel of the variant's package; a knob's may differ from it in capitals.

    Knobs and axes of a captured kernel are its arguments.
    """
    chosen = op.variant(variant)
    knobs = {field.name for field in dataclasses.fields(chosen.config)} if chosen.config is not None else set()
    if op.kind == "captured":
        return {name: name for name in (*op.axes, *knobs)}
    package = chosen.run.__module__.rpartition(".")[0] or chosen.run.__module__
    modules = [module for name, module in sorted(sys.modules.items()) if name == package or name.startswith(f"{package}.")]
    kernels = [value for module in modules for value in vars(module).values() if hasattr(value, "arg_names")]
    arguments = [argument for kernel in kernels for argument in _parameters(kernel)]
    names = {axis: axis for axis in op.axes if axis in dict(arguments)}
    for name, is_constexpr in arguments:
        if is_constexpr and name.lower() in knobs:
            names.setdefault(name.lower(), name)
    return names


def _parameters(kernel: Any) -> list[tuple[str, bool]]:
    """Return the parameters of a kernel, also of an autotuned or interpreted kernel, and whether each is a constexpr."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    parameters = inspect.signature(kernel).parameters.values() if inspect.isfunction(kernel) else ()
    return [(parameter.name, "constexpr" in str(parameter.annotation)) for parameter in parameters]


@app.command("import")
def import_(
    op: o.OpName,
    files: Annotated[list[Path], o.argument("FILE...", "Files of `cache export`, or JSON in its form.")],
    gpu: Annotated[str, o.gpu("The GPU of the configs, by the name of its folder.")],
    force: Annotated[bool, o.flag("--force", "Store configs of another GPU, too, and replace stored configs.")] = False,
    configs: o.Configs = None,
) -> None:
    """Store the configs of exported files in the cache, after all of them are checked."""
    o.use_configs(configs)
    from kerneltune import exchange

    operator = loading.load_op(op)
    root = cache.default_root()
    loading.require_writable(root)
    path = cache.path_of(op, gpu, root)
    stored_keys = {entry.key for entry in cache.load_strict(path)}
    accepted = []
    for file in files:
        for entry in exchange.read(file, operator, None if force else gpu):
            try:
                _require_fit(operator, entry)
            except ValueError as error:
                raise ValueError(f"{file}: {entry.case.label}: {error}") from error
            if force or entry.key not in stored_keys:
                accepted.append(entry)
    if accepted:
        cache.store(gpu, accepted, root)
    show(f"{counted(len(accepted), 'entry', 'entries')} stored in {path}")


@app.command()
def check(configs: o.Configs = None) -> None:
    """Read every file strictly; exit code 2 and the reason at the first broken entry, or if no file has an entry.

    Exit code 1, and a line each, where a config was surely slower than its variant's default when it was chosen.
    """
    o.read_configs(configs)
    files = _chosen(None, None)
    entries = [entry for path in files for entry in checked_entries(path)]
    folders, own = " and ".join(dict.fromkeys(str(path.parents[1]) for path in files)), cache.default_root()
    if not entries:
        raise ValueError(f"no cached configs in {counted(len(files), 'file')} of {folders}")
    show_wrapped(f"good: {counted(len(entries), 'entry', 'entries')} in {counted(len(files), 'file')} of {folders}")
    if own not in {path.parents[1] for path in files}:
        show_wrapped(f"none of them is yours: no file in {own.absolute()}, where `tune` and `cache import` store configs")
    timed = [(entry.key.label, *entry.evidence["over_default"]) for entry in entries if entry.evidence.get("over_default")]
    slower = [f"{label}: {low:.3f} to {high:.3f} of its default's speed" for label, low, high in timed if high < 1.0]
    if timed:
        show_wrapped(f"{len(timed)} were timed in the same rounds as their default: {len(slower)} slower than it")
    for line in slower:
        show_wrapped(line)
    if slower:
        raise typer.Exit(1)


def checked_entries(path: Path) -> list[CacheEntry]:
    """Return the entries of a file; an entry that calls do not use is an error."""
    ops = loading.load_ops()
    o.one_of(f"{path}: op", path.stem, ops)
    entries = load_strict(path)
    for index, entry in enumerate(entries):
        try:
            _require_fit(ops[path.stem], entry)
        except ValueError as error:
            raise ValueError(f"{path}: entries[{index}]: {error}") from error
    return entries


def _require_fit(op: Op, entry: CacheEntry) -> None:
    """Raise ValueError for an entry of another operator, or for a config that is not valid for its case."""
    variant = op.variant(entry.variant)
    variant.config_from(entry.config)
    names = tuple(axis for axis, _ in entry.case.axes)
    if names != op.axes:
        raise ValueError(f"axes: {', '.join(names) or 'none'}: expected {', '.join(op.axes)}")
    for field, value, offered in (("dtype", entry.case.dtype, op.dtypes), ("quant", entry.case.quant, op.quants)):
        o.one_of(field, value, offered)
    o.one_of("policy", entry.policy, o.POLICIES)
    options = dict(entry.case.options)
    if options.keys() != op.options.keys() or any(options[name] not in offered for name, offered in op.options.items()):
        raise ValueError(f"options: {options}: expected a value for each of {', '.join(op.options) or 'none'}")
    reason = Chooser.of(op, variant).why_rejected(entry)
    if reason is not None:
        raise ValueError(reason)


def _chosen(op: str | None, gpu: str | None) -> list[Path]:
    """Return the cache files of an operator and a GPU; of all operators or GPUs where the argument is None."""
    files = loading.config_files()
    if not files:
        raise ValueError(f"no cached configs in {cache.default_root()}")
    names = sorted({path.stem for path in files})
    if op is not None and op not in names:
        if op not in loading.load_summaries():
            raise unknown("op with cached configs", op, names, sweep_file.OR_OP)
        command = f"kerneltune tune {loading.family_of(op) or 'FAMILY'} --op {op}"
        raise ValueError(f"op: {op!r}: no cached configs in {cache.default_root()}: `{command}` finds them")
    if gpu is not None:
        o.one_of("gpu", gpu, sorted({path.parent.name for path in files if op in (None, path.stem)}))
    return [path for path in files if op in (None, path.stem) and gpu in (None, path.parent.name)]
