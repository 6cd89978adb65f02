"""Load and check the operators, the plan, the capture and the folders of a command before its work begins."""

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kerneltune import device, sweep_file, workloads
from kerneltune.cache import CONFIGS, default_root, read_roots, readable
from kerneltune.cli.options import captured, one_of
from kerneltune.errors import unknown
from kerneltune.files import in_checkout, written_root
from kerneltune.listing import OpSummary, same_name, summary_of
from kerneltune.plan import Options, Plan, Selection, load_plan
from kerneltune.spec import PLUGINS, Case, Op
from kerneltune.task import runs_folder, trials_folder

_USUAL_SIZE, _DIGITS = 4096, 15


def missing_family() -> str:
    """Return the message of a command that was called without a family."""
    return f"Missing argument 'family': expected one of {', '.join(sweep_file.families())}{sweep_file.OR_FAMILY}"


def family_of(op: str) -> str:
    """Return the family whose sweep file has cases of an operator; empty if the name is no operator, or has no sweep file."""
    if op not in load_summaries():
        return ""
    ops = load_ops()
    for family in sweep_file.families():
        with suppress(ValueError):  # a broken sweep file of another family is not the mistake here
            loaded = sweep_file.load(sweep_file.find(family), ops)
            if any(sweep_case.op == op for sweep_case in (*loaded.check, *loaded.bench)):
                return family
    return ""


def config_files() -> list[Path]:
    """Return the files of the config cache, GPU by GPU; unless a folder is named, also packaged files that no file replaces."""
    folders = read_roots()
    for folder in filter(Path.is_file, folders):
        raise ValueError(f"cannot read {folder}: expected a folder")
    names = {path.relative_to(folder) for folder in folders for path in folder.glob("*/*.json")}
    return [readable(name) for name in sorted(names)]


def where_configs_serve() -> str:
    """Return a line about the programs that read the stored configs; empty if all programs in this checkout read them."""
    folder = default_root().resolve()
    if folder != written_root("configs").resolve():
        return f"programs use these configs where {CONFIGS}={folder} is set"
    return "" if in_checkout() else f"programs started in {Path.cwd()} use these configs; elsewhere set {CONFIGS}={folder}"


def require_writable(folder: Path) -> None:
    """Raise ValueError for a folder that cannot be written, before the work begins."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error.strerror}") from error


def require_folders(options: Options) -> None:
    """Raise ValueError for a folder of this device that could not be written when the work is done."""
    gpu = device.current()
    folders = [runs_folder(options.results, gpu.slug)]
    if gpu.is_gpu and options.extent != "check":
        folders.append(options.records_folder)
    if gpu.is_gpu and options.extent == "tune":
        folders += [default_root() / gpu.slug, trials_folder(options.results, gpu.slug)]
    for folder in folders:
        require_writable(folder)


def use_plugins(modules: Sequence[str]) -> None:
    """Name modules of operators in the environment, so that this process and its subprocesses load them."""
    for name in modules:
        if name.endswith(".py"):
            if not Path(name).is_file():
                raise ValueError(f"plug-in {name}: no such file")
        elif Path(name).is_file() or not all(part.isidentifier() for part in name.split(".")):
            beside = Path(name).with_suffix(".py") if Path(name).name else Path(name)
            near = f"; did you mean {beside}?" if beside.is_file() else ""
            raise ValueError(f"plug-in {name}: expected a .py file, or the name of a module{near}")
    present = os.environ.get(PLUGINS)
    os.environ[PLUGINS] = os.pathsep.join([*([present] if present else []), *modules])


def captured_ops(folder: str = "") -> dict[str, Op]:
    """Return the operators of a capture by name; without a folder, of the capture in use; empty without a capture."""
    folder = folder or captured()
    if not folder:
        return {}
    from kerneltune.adopt.operators import operators

    return {op.name: op for op in operators(folder)}


def damaged_classes() -> list[str]:
    """Return a line for each class of the capture in use that cannot be read."""
    if captured():
        from kerneltune.adopt.folder import read_classes

        with suppress(ValueError):  # no capture, which the error of the command says
            _classes, damaged = read_classes(Path(captured()))
            return damaged
    return []


def capture_folder(family: str) -> str:
    """Return the folder of a capture whose folder or sweep file is given as the family; empty for another family."""
    folder = Path(family)
    if not folder.is_dir():
        if folder.name != "sweep.yaml":
            return ""
        folder = folder.parent
    return str(folder) if family and (folder / "classes").is_dir() else ""


def load_summaries() -> Mapping[str, OpSummary]:
    """Return the summaries of operators and workloads by name, without importing their code."""
    from kerneltune import ops

    of_ops, of_workloads = ops.summaries(device.select_backend), workloads.summaries(device.select_backend)
    if of_ops.keys() & of_workloads.keys():
        load_ops()  # raises ValueError with both modules
    return of_ops | of_workloads | {name: summary_of(op) for name, op in captured_ops().items()}


def load_ops(folder: str = "") -> Mapping[str, Op]:
    """Return operators and workloads by name, ready to run on the GPU, or in the interpreter on a machine without a GPU.

    folder: folder of a capture whose operators are added; empty for the capture in use.
    """
    device.select_backend()
    from kerneltune import ops

    operators, workload_ops = ops.load(), workloads.load()
    for name in operators.keys() & workload_ops.keys():
        raise same_name(operators[name], workload_ops[name])
    return operators | workload_ops | captured_ops(folder)


def load_op(name: str) -> Op:
    """Return an operator or workload by name."""
    ops = load_ops()
    return ops[one_of("op", name, ops)]


def case_of_sizes(op: Op, sizes: Iterable[str], dtype: str | None, quant: str | None, *, complete: bool = False) -> Case:
    """Make the case of sizes and options such as `M=8192`: every other option has its default, without a size all axes are 4096.

    None stands for the operator's first element type and its first mode.

    complete: refuse a case without a size; a case that lacks some sizes is always refused.
    """
    axes = dict.fromkeys(op.axes, _USUAL_SIZE)
    options = {name: values[0] for name, values in op.options.items()}
    values = [text.partition("=")[::2] for text in sizes]
    names = [name for name, _ in values]
    for name, value in values:
        if names.count(name) > 1:
            raise ValueError(f"{name}: {value!r}: expected each name once")
        if name not in axes and name not in options:
            raise unknown("axis", name, op.axes, f", or an option: {', '.join(options)}" if options else "")
        if name in options:
            offered = {str(offer): offer for offer in op.options[name]}
            options[name] = offered[one_of(name, value, offered)]
        elif not value.isdecimal() or len(value) > _DIGITS:
            raise ValueError(f"{name}: {value!r}: expected a size, like {name}={_USUAL_SIZE}")
        else:
            axes[name] = int(value)
    missing = [axis for axis in op.axes if axis not in names]
    if missing and (complete or len(missing) < len(op.axes)):
        raise ValueError(f"{', '.join(missing)}: not given: expected a size for each of {', '.join(op.axes)}")
    dtype, quant = one_of("dtype", dtype or op.dtypes[0], op.dtypes), one_of("quant", quant or op.quants[0], op.quants)
    return Case("x".join(map(str, axes.values())), tuple(axes.items()), dtype, quant, tuple(options.items()))


def make_plan(family: str, selection: Selection, **options: Any) -> Plan:
    """Return the plan of a command: the selected part of a family, with the options of `make_options`."""
    run_options = make_options(family, **options)
    return load_plan(load_ops(), replace(selection, family=family), run_options)


def make_options(family: str = "", results: Path | None = None, **fields: Any) -> Options:
    """Make the options of a run and the limits of its searches; an option that is None keeps its default.

    Args:
        family: family whose records the run reads or writes; raises ValueError for a family without a sweep file.
        results: folder of the records; None for the usual folder of the family.
        fields: the other options by name.
    """
    try:
        if family:
            sweep_file.find(family)
    except ValueError:
        op_family = family_of(family)
        if op_family:
            hint = f"an operator of family {op_family}: expected {op_family} --op {family}"
            raise ValueError(f"family: {family!r}: {hint}") from None
        raise
    defaults = Options(results=sweep_file.results_root(results))
    chosen = {name: value for name, value in fields.items() if value is not None}
    limits = {name: chosen.pop(name) for name in list(chosen) if hasattr(defaults.search, name)}
    return replace(defaults, search=replace(defaults.search, **limits), **chosen)
