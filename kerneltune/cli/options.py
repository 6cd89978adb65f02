"""Declare the options that several commands share, and check their values."""

import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kerneltune import device, sweep_file, workloads
from kerneltune.cache import default_root, read_roots, readable
from kerneltune.cli.settings import FAMILY
from kerneltune.errors import unknown
from kerneltune.files import RESULTS, decode, in_checkout
from kerneltune.listing import OpSummary, summary_of
from kerneltune.plan import Options, Plan, Selection, load_plan
from kerneltune.search import SAMPLERS
from kerneltune.spec import PLUGINS, Case, Op, Variant
from kerneltune.task import trials_folder
from kerneltune.wording import dtype_name

POLICIES = ("cold", "hot", "eager")
STYLES = ("text", "markdown", "csv")
_USUAL_SIZE, _DIGITS = 4096, 15


def option(names: str, metavar: str, text: str, **more: Any) -> Any:
    """Declare an option that takes a value; blanks separate its names, and help shows `metavar` for the value."""
    return typer.Option(*names.split(), metavar=metavar, help=text, **more)


def flag(name: str, text: str) -> Any:
    """Declare an option without a value."""
    return typer.Option(name, help=text)


def argument(metavar: str, text: str) -> Any:
    """Declare an argument that help calls `metavar`."""
    return typer.Argument(metavar=metavar, help=text)


def at_least(least: float, *, above: bool = False) -> Callable[[typer.CallbackParam, Any], Any]:
    """Return a callback that refuses infinite and NaN values, values below `least`, and with `above` also `least` itself."""

    def check(parameter: typer.CallbackParam, value: Any) -> Any:
        for number in value if isinstance(value, list | tuple) else [value]:
            if number is not None and (not least <= number < float("inf") or (above and number == least)):
                expected = f"more than {least:g}" if above else f"{least:g} or more"
                raise ValueError(f"{parameter.opts[0].removeprefix('--')}: {number!r}: expected {expected}")
        return value

    return check


def count(name: str, text: str, least: int = 1) -> Any:
    """Declare an option that takes an integer."""
    return option(name, "N", text, callback=at_least(least))


def pick(name: str, words: Collection[str], text: str) -> Any:
    """Declare an option that takes one of a few words."""

    def check(value: str | None) -> str | None:
        return value and choice(name.removeprefix("--"), value, words)

    return option(name, "|".join(words), text, callback=check)


def seconds(text: str) -> Any:
    """Declare the option `--budget`."""
    return option("--budget", "SECONDS", text, callback=at_least(0, above=True))


def existing_folder(folder: Path | None) -> Path | None:
    """Return the folder of the config cache, which must exist unless it belongs to a capture that nobody tuned yet."""
    if folder is not None and not folder.exists() and not captured():
        raise ValueError(f"configs: {str(folder)!r}: no such folder")
    return folder


def gpu_folder(name: str | None) -> str | None:
    """Return a name that `--gpu` gives; raise ValueError for a name that no folder of a GPU has."""
    if name is not None and name != device.slug(name):
        raise ValueError(f"gpu: {name!r}: expected the name of a folder, like {device.slug(name) or 'nvidia_h200'}")
    return name


def gpu(text: str) -> Any:
    """Declare the option `--gpu`."""
    return option("--gpu", "NAME", text, callback=gpu_folder)


Family = Annotated[str, typer.Argument(envvar=FAMILY, show_envvar=False, help="A file of sweeps/ by name, or a .yaml file.")]
OpName = Annotated[str, argument("OP", "Name of an operator.")]
Gpu = Annotated[str | None, gpu("The GPU, by the name of its folder, like nvidia_h200.")]
VariantName = Annotated[str, option("--variant", "NAME", "The variant whose configs are meant.")]
OpNames = Annotated[list[str] | None, option("--op", "NAME", "Only this operator; may be repeated.")]
CaseNames = Annotated[list[str] | None, option("--case", "NAME", "Only cases whose name matches, like 'te-*'; may be repeated.")]


def full_name(value: Any) -> Any:
    """Return torch's name of the element type of `--dtype`, which may be short, or the names of several types."""
    return [dtype_name(name) for name in value] if isinstance(value, list) else value and dtype_name(value)


Dtypes = Annotated[
    list[str] | None, option("--dtype", "NAME", "Only this element type, like bf16; may be repeated.", callback=full_name)
]
Dtype = Annotated[str | None, option("--dtype", "NAME", "Element type of the case, like bf16.", callback=full_name)]
Quant = Annotated[str | None, option("--quant", "NAME", "Quantization mode of the case.")]
Quants = Annotated[list[str] | None, option("--quant", "NAME", "Only this quantization mode; may be repeated.")]
VariantNames = Annotated[
    list[str] | None, option("--variant", "NAME", "Only variants or peers whose name matches, like 'rowwise*'; may be repeated.")
]
PolicyName = Annotated[
    str | None, pick("--policy", POLICIES, "Time with a cold L2, a hot L2, or launch by launch; else as the operator says.")
]
Style = Annotated[str, pick("--format", STYLES, "Form of the table.")]
Budget = Annotated[float | None, seconds("Tuning time per case; of a capture, of all classes.")]
Trials = Annotated[int | None, count("--trials", "Most configs to try per case.")]
MaxCases = Annotated[int | None, count("--max-cases", "Most cases of a sweep file; 100000 by default.")]
Configs = Annotated[Path | None, option("--configs", "DIR", "Folder of the config cache.", envvar="KERNELTUNE_CONFIGS")]
ReadConfigs = Annotated[
    Path | None,
    option("--configs", "DIR", "Folder of the config cache.", envvar="KERNELTUNE_CONFIGS", callback=existing_folder),
]
Results = Annotated[Path | None, option("--results", "DIR", "Folder of the records.", envvar=RESULTS)]
Sampler = Annotated[str | None, pick("--sampler", SAMPLERS, "Search large spaces by our sampler or at random.")]
Workers = Annotated[int | None, count("--workers", "Processes that compile; one per CPU core if not given.")]
Output = Annotated[Path | None, option("--output -o", "FILE", "Write to this file instead.")]


_SELECTING = {"op": OpNames, "case": CaseNames, "dtype": Dtypes, "quant": Quants, "variant": VariantNames}


def selection(without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's parameter `selection`, a Selection without a family, by the options that select.

    without: the options among `op`, `case`, `dtype`, `quant` and `variant` that the command does not have.
    """
    names = [name for name in _SELECTING if name not in without]

    def changed(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            lists: dict[str, Any] = {f"{name}s": tuple(dict.fromkeys(arguments.pop(name) or ())) for name in names}
            command(selection=Selection(**lists), **arguments)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            keyword = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            options = [keyword.replace(name=name, default=None, annotation=_SELECTING[name]) for name in names]
            parameters += options if parameter.name == "selection" else [keyword]
        vars(run)["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return changed


def choice(field: str, value: str, known: Collection[str]) -> str:
    """Return the value if it is known."""
    if value not in known:
        raise unknown(field, value, known, sweep_file.NO_OP if field.split()[-1] == "op" else "")
    return value


def refuse(expected: str, **options: Any) -> None:
    """Raise ValueError for an option that was given, so is not None, False or empty, and has no effect here."""
    for name, value in options.items():
        if value is not None and value is not False and value not in ("", [], ()):
            first = value[0] if isinstance(value, list | tuple) else value
            shown = "" if value is True else f"{str(first) if isinstance(first, Path) else first!r}: "
            raise ValueError(f"{name.replace('_', '-')}: {shown}{expected}")


def percent(field: str, text: str | None) -> float | None:
    """Return the fraction of a percentage, `1%` or `1`; None for None."""
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = float("nan")
    if not 0 < value < 100:
        raise ValueError(f"{field}: {text!r}: expected a percentage above 0 and below 100, such as 1%")
    return value / 100


def config_of(variant: Variant, field: str, text: str) -> Any:
    """Return the config of a JSON text."""
    try:
        values = decode(text, dict[str, Any])
    except ValueError as error:
        raise ValueError(f"{field}: {text!r}: {error}") from error
    return variant.config_from(values)


def without_family() -> str:
    """Return the message of a command that was called without a family."""
    return f"Missing argument 'family': expected one of {', '.join(sweep_file.families())}{sweep_file.NO_FAMILY}"


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


def configs_root(configs: Path | None) -> Path:
    """Return the given folder of the config cache, else the folder in which kernels look configs up."""
    return configs or default_root()


def config_files(configs: Path | None) -> list[Path]:
    """Return the files of the config cache, GPU by GPU; without a given folder also packaged files that no file replaces."""
    folders = read_roots(configs)
    for folder in filter(Path.is_file, folders):
        raise ValueError(f"cannot read {folder}: expected a folder")
    names = {path.relative_to(folder) for folder in folders for path in folder.glob("*/*.json")}
    return [readable(name, configs) for name in sorted(names)]


def where_configs_serve(configs: Path | None) -> str:
    """Return a line about the programs that read the stored configs; empty if every call reads them."""
    if configs is not None and configs.resolve() != default_root().resolve():
        return f"operators read {default_root()}: set KERNELTUNE_CONFIGS={configs.resolve()} where they shall use these configs"
    if os.environ.get("KERNELTUNE_CONFIGS") or in_checkout():
        return ""
    return f"programs started in {Path.cwd()} use these configs; elsewhere set KERNELTUNE_CONFIGS={default_root().resolve()}"


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
    folders = [options.results / "runs" / gpu.slug]
    if gpu.is_gpu and options.mode != "check":
        folders.append(options.results / gpu.slug)
    if gpu.is_gpu and options.mode == "tune":
        folders += [configs_root(options.configs) / gpu.slug, trials_folder(options.results, gpu.slug)]
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


_capture = {"folder": ""}


def use_capture(folder: str) -> None:
    """Let this command use the kernels of a capture as operators; an empty `folder` means no capture."""
    _capture["folder"] = os.path.abspath(folder) if folder else ""


def captured() -> str:
    """Return the folder of the capture that this command uses; empty for none."""
    return _capture["folder"]


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
            return read_classes(Path(captured()))[1]
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
        modules = f"in {operators[name].module} and in {workload_ops[name].module}"
        raise ValueError(f"two operators are called {name!r}: {modules}")
    return operators | workload_ops | captured_ops(folder)


def load_op(name: str) -> Op:
    """Return an operator or workload by name."""
    ops = load_ops()
    return ops[choice("op", name, ops)]


def case_of_sizes(op: Op, sizes: Iterable[str], dtype: str, quant: str, *, whole: bool = False) -> Case:
    """Make the case of sizes and options such as `M=8192`: every other axis is 4096, every other option its default.

    whole: refuse a case that lacks a size.
    """
    axes = dict.fromkeys(op.axes, _USUAL_SIZE)
    options = {name: values[0] for name, values in op.options.items()}
    values = [text.partition("=")[::2] for text in sizes]
    for name, value in values:
        if name not in axes and name not in options:
            raise unknown("axis", name, op.axes, f", or an option: {', '.join(options)}" if options else "")
        if name in options:
            offered = {str(offer): offer for offer in op.options[name]}
            options[name] = offered[choice(name, value, offered)]
        elif not value.isdecimal() or len(value) > _DIGITS:
            raise ValueError(f"{name}: {value!r}: expected a size, like {name}={_USUAL_SIZE}")
        else:
            axes[name] = int(value)
    missing = [axis for axis in op.axes if axis not in dict(values)]
    if whole and missing:
        raise ValueError(f"{', '.join(missing)}: not given: expected a size for each of {', '.join(op.axes)}")
    choice("dtype", dtype, op.dtypes)
    choice("quant", quant, op.quants)
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
