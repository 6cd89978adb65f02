"""Options that several commands share, and what they stand for."""

import fnmatch
import os
import tempfile
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kerneltune.cli.settings import FAMILY
from kerneltune.errors import unknown
from kerneltune.files import RESULTS, data_root
from kerneltune.spec import PLUGINS, Case, Op, dtype_name

if TYPE_CHECKING:
    from kerneltune.listing import OpFacts
    from kerneltune.plan import Options, Selection

POLICIES = ("cold", "hot", "eager")
_USUAL_SIZE = 4096
SAMPLERS = ("ours", "gp", "tpe", "random", "qmc")

Family = Annotated[
    str, typer.Argument(envvar=FAMILY, show_envvar=False, help="A file of sweeps/ by name, or a path ending in .yaml.")
]
OpNames = Annotated[list[str] | None, typer.Option("--op", metavar="NAME", help="Only this operator; may be repeated.")]
CaseNames = Annotated[
    list[str] | None, typer.Option("--case", metavar="NAME", help="Only cases with such a name, like 'te-*'; may be repeated.")
]


def _whole_names(values: list[str] | None) -> list[str] | None:
    return values and [dtype_name(value) for value in values]


def whole_name(value: str | None) -> str | None:
    """Return torch's name of an element type of `--dtype`, which may be short."""
    return value and dtype_name(value)


Dtypes = Annotated[
    list[str] | None,
    typer.Option("--dtype", metavar="NAME", callback=_whole_names, help="Only this element type, like bf16; may be repeated."),
]
Quants = Annotated[
    list[str] | None, typer.Option("--quant", metavar="NAME", help="Only this quantisation mode; may be repeated.")
]
VariantNames = Annotated[
    list[str] | None,
    typer.Option("--variant", metavar="NAME", help="Only variants or peers of such a name, like 'rowwise*'; may be repeated."),
]
PolicyName = Annotated[str, typer.Option("--policy", metavar="|".join(POLICIES), help="How times are taken.")]
Budget = Annotated[float | None, typer.Option("--budget", metavar="SECONDS", help="Tuning time per case.")]
Trials = Annotated[int | None, typer.Option("--trials", metavar="N", help="Most configs to try per case.")]
MaxCases = Annotated[
    int | None, typer.Option("--max-cases", metavar="N", min=1, help="Most cases of a sweep file; 100000 unless told.")
]
Configs = Annotated[
    Path | None, typer.Option("--configs", metavar="DIR", envvar="KERNELTUNE_CONFIGS", help="Folder of the config cache.")
]
Results = Annotated[Path | None, typer.Option("--results", metavar="DIR", envvar=RESULTS, help="Folder of the records.")]
Sampler = Annotated[str | None, typer.Option("--sampler", metavar="|".join(SAMPLERS), help="How large spaces are searched.")]
Workers = Annotated[
    int | None, typer.Option("--workers", metavar="N", help="Processes that compile; one per CPU core if not given.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to this file instead.")]


def choice(field: str, value: str, known: Collection[str]) -> str:
    """Return the value, if it is known.

    Raises:
        ValueError: it is not; names what is.
    """
    if value not in known:
        raise unknown(field, value, known)
    return value


def chosen(field: str, wanted: Sequence[str] | None, present: Iterable[str]) -> list[str]:
    """Return the values wanted, or all present values if none is wanted.

    Raises:
        ValueError: one that is not present; names what is.
    """
    known = list(dict.fromkeys(present))
    return [choice(field, value, known) for value in wanted or known]


def matching(field: str, patterns: Sequence[str] | None, present: Iterable[str]) -> list[str]:
    """Return the values that match a pattern, or all present values if no pattern is given.

    Raises:
        ValueError: a pattern of none; names what is present.
    """
    known = list(dict.fromkeys(present))
    for pattern in patterns or ():
        if not fnmatch.filter(known, pattern):
            choice(field, pattern, known)
    return [name for name in known if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def number(field: str, value: float | None, least: float) -> None:
    """Raise ValueError for a number below `least`, infinite or NaN; accept None."""
    if value is not None and not least <= value < float("inf"):
        raise ValueError(f"{field}: {value!r}: expected {least:g} or more")


def percent(field: str, text: str | None) -> float | None:
    """`1%` or `1` as a fraction.

    Raises:
        ValueError: it is none, or not between 0 and 100.
    """
    if text is None:
        return None
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = float("nan")
    if not 0 < value < 100:
        raise ValueError(f"{field}: {text!r}: expected a percentage above 0, such as 1%")
    return value / 100


def knobs(field: str, given: list[str] | None) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """`warps=1,2` as a name and its values.

    Raises:
        ValueError: it has another form.
    """
    split = []
    for text in given or ():
        name, _, values = text.partition("=")
        if not name or not all(values.split(",")):
            raise ValueError(f"{field}: {text!r}: expected NAME=V1,V2")
        split.append((name, tuple(values.split(","))))
    return tuple(split)


def results_root(results: Path | None, family: str | None = None) -> Path:
    """Return the folder of the records, as in `sweep`, for a command that needs the family's sweep file.

    Raises:
        ValueError: there is no such family.
    """
    from kerneltune import sweep

    if family is not None:
        sweep.find(family)
    return sweep.results_root(results, family)


def configs_root(configs: Path | None) -> Path:
    """Return the folder of the config cache: as given, else where kernels look."""
    from kerneltune.cache import roots

    return configs or roots()


def config_files(configs: Path | None, below: str = "*.json") -> list[Path]:
    """Return the files of the config cache, GPU by GPU: the packaged file where nothing is given and there is no other.

    below: which files of a GPU's folder; `rules/*.json` are those of rules.
    """
    from kerneltune.cache import readable, roots

    folders = [configs] if configs else [roots(), *([] if os.environ.get("KERNELTUNE_CONFIGS") else [data_root("configs")])]
    names = {path.relative_to(folder) for folder in folders for path in folder.glob(f"*/{below}")}
    return [readable(name, configs) for name in sorted(names)]


def where_configs_serve(configs: Path | None) -> str:
    """Return a line on who reads the configs that were stored; empty where every call does."""
    from kerneltune.cache import roots
    from kerneltune.files import in_checkout

    if configs is not None and configs.resolve() != roots().resolve():
        return f"operators read {roots()}: set KERNELTUNE_CONFIGS={configs.resolve()} where they shall use these configs"
    if os.environ.get("KERNELTUNE_CONFIGS") or in_checkout():
        return ""
    return f"programs started in {Path.cwd()} use these configs; elsewhere set KERNELTUNE_CONFIGS={roots().resolve()}"


def require_writable(folder: Path) -> None:
    """Fail before the work rather than after it.

    Raises:
        ValueError: nothing can be written into the folder, or it cannot be made.
    """
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error.strerror}") from error


def require_tunable(configs: Path | None, results: Path, exhaustive: bool = False) -> None:
    """Raise ValueError where a search on this machine could not keep its configs, its trials, itself or a whole space."""
    from kerneltune import device

    here = device.current().slug
    kept = [configs_root(configs) / here, results / "runs" / "trials" / here, results / "runs" / "searches"]
    for folder in [*kept, *([results / here / "spaces"] if exhaustive else [])]:
        require_writable(folder)


def make_folder(folder: Path) -> None:
    """Make a folder.

    Raises:
        ValueError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error.strerror}") from error


def use_plugins(modules: Sequence[str]) -> None:
    """Load operators of these modules as well, by the environment, so that processes started from here have them too."""
    known = os.environ.get(PLUGINS)
    os.environ[PLUGINS] = os.pathsep.join([*([known] if known else []), *modules])


def use_capture(folder: str) -> None:
    """Load the kernels of a capture as operators."""
    os.environ["KERNELTUNE_CAPTURED"] = os.path.abspath(folder)
    use_plugins(["kerneltune.adopt.captured"])


def is_capture(family: str) -> bool:
    """Return whether a family is the folder of a capture."""
    return Path(family, "classes").is_dir()


def load_facts() -> "Mapping[str, OpFacts]":
    """Return what is listed of operators and workloads by name, without their code."""
    from kerneltune import device, ops, workloads

    known, built = ops.facts(device.select_backend), workloads.facts(device.select_backend)
    if known.keys() & built.keys():
        load_ops()  # says where both are
    return known | built


def load_ops() -> Mapping[str, Op]:
    """Return operators and workloads by name, ready to run here: on the GPU, or in the interpreter where there is none."""
    from kerneltune import device

    device.select_backend()
    from kerneltune import ops, workloads

    known, built = ops.load(), workloads.load()
    for name in known.keys() & built.keys():
        raise ValueError(f"two operators are called {name!r}: in {known[name].module} and in {built[name].module}")
    return known | built


def case_of_sizes(op: Op, sizes: Iterable[str], dtype: str, quant: str) -> Case:
    """Make the case of sizes such as `M=8192`: every other axis is 4096, every option its default.

    Raises:
        ValueError: no such axis, dtype or quant, or no size.
    """
    axes = dict.fromkeys(op.axes, _USUAL_SIZE)
    for text in sizes:
        axis, _, size = text.partition("=")
        choice("axis", axis, op.axes)
        if not size.isdecimal():
            raise ValueError(f"{axis}: {size!r}: expected a size, like {axis}={_USUAL_SIZE}")
        axes[axis] = int(size)
    choice("dtype", dtype, op.dtypes)
    choice("quant", quant, op.quants)
    options = tuple((name, values[0]) for name, values in op.options.items())
    return Case("shown", tuple(axes.items()), dtype, quant, options)


def make_selection(
    known: Mapping[str, Op],
    family: str,
    ops: list[str] | None = None,
    cases: list[str] | None = None,
    dtypes: list[str] | None = None,
    quants: list[str] | None = None,
    variants: list[str] | None = None,
    *,
    max_cases: int | None = None,
) -> "Selection":
    """Make the selection of what to run.

    Raises:
        ValueError: a name that no operator knows.
    """
    from kerneltune.plan import Selection

    chosen = [known[choice("op", name, known)] for name in ops or known]
    _all_known("dtype", dtypes, (dtype for op in chosen for dtype in op.dtypes))
    _all_known("quant", quants, (quant for op in chosen for quant in op.quants))
    matching("variant", variants, (variant.name for op in chosen for variant in op.variants))
    lists = {"ops": ops, "cases": cases, "dtypes": dtypes, "quants": quants, "variants": variants}
    given: dict[str, Any] = {name: tuple(dict.fromkeys(values)) for name, values in lists.items() if values}
    given |= {} if max_cases is None else {"max_cases": max_cases}
    return Selection(family=family, **given)


def make_options(policy: str, **given: Any) -> "Options":
    """Make the options of how to run; what is None keeps its default.

    Raises:
        ValueError: an unknown policy or sampler, or a number out of range.
    """
    from kerneltune.plan import Options

    choice("policy", policy, POLICIES)
    if given.get("sampler") is not None:
        choice("sampler", given["sampler"], SAMPLERS)
    for field, name, least in (("budget", "budget_s", 0.0), ("trials", "trials", 1), ("workers", "workers", 1)):
        number(field, given.get(name), least)
    if given.get("budget_s") == 0:
        raise ValueError("budget: 0.0: expected more than 0 seconds")
    return Options(policy=policy, **{name: value for name, value in given.items() if value is not None})


def _all_known(field: str, names: list[str] | None, known: Iterable[str]) -> None:
    offered = list(dict.fromkeys(known))
    for name in names or ():
        choice(field, name, offered)
