"""Declare the options that several commands share, and check their values."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kerneltune import cache, device, sweep_file
from kerneltune.cache import CONFIGS
from kerneltune.errors import unknown
from kerneltune.files import RESULTS, decode
from kerneltune.plan import Selection
from kerneltune.spec import Variant
from kerneltune.wording import dtype_name

POLICIES = ("cold", "hot", "eager")
STYLES = ("text", "markdown", "csv")


def option(names: str, metavar: str, text: str, **more: Any) -> Any:
    """Declare an option that takes a value; blanks separate its names, and help shows `metavar` for the value."""
    return typer.Option(*names.split(), metavar=metavar, help=text, **more)


def named_folder(text: str) -> Path:
    """Return the folder that an option names; an empty name, as of a variable that is not set, is not the current folder."""
    if not text:
        raise typer.BadParameter("'': expected a folder")
    return Path(text)


def flag(name: str, text: str) -> Any:
    """Declare an option without a value."""
    return typer.Option(name, help=text)


def argument(metavar: str, text: str) -> Any:
    """Declare an argument that help calls `metavar`."""
    return typer.Argument(metavar=metavar, help=text)


def _at_least(least: float, *, above: bool = False) -> Callable[[typer.CallbackParam, Any], Any]:
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
    return option(name, "N", text, callback=_at_least(least))


def pick(name: str, words: Collection[str], text: str) -> Any:
    """Declare an option that takes one of a few words."""

    def check(value: str | None) -> str | None:
        return value and one_of(name.removeprefix("--"), value, words)

    return option(name, "|".join(words), text, callback=check)


def seconds(text: str) -> Any:
    """Declare the option `--budget`."""
    return option("--budget", "SECONDS", text, callback=_at_least(0, above=True))


_capture = {"folder": ""}


def use_capture(folder: str) -> None:
    """Let this command use a capture's kernels as operators, and its records and configs unless other folders are named.

    An empty `folder` means no capture.
    """
    _capture["folder"] = os.path.abspath(folder) if folder else ""
    for variable, name in ((RESULTS, "results"), (CONFIGS, "configs")) if folder else ():
        os.environ.setdefault(variable, os.path.join(folder, name))


def captured() -> str:
    """Return the folder of the capture that this command uses; empty for none."""
    return _capture["folder"]


def use_configs(folder: Path | None) -> None:
    """Let all look-ups of this command and its processes read and write the folder of `--configs`; None for the usual folder."""
    if folder is not None:
        cache.use_root(folder)


def read_configs(folder: Path | None) -> None:
    """Use a folder as `use_configs` does; it must exist unless it belongs to a capture that nobody tuned yet."""
    if folder is not None and not folder.exists() and not captured():
        raise ValueError(f"configs: {str(folder)!r}: no such folder")
    use_configs(folder)


def _gpu_folder(name: str | None) -> str | None:
    """Return a name that `--gpu` gives; raise ValueError for a name that no folder of a GPU has."""
    if name is not None and name != device.slug(name):
        raise ValueError(f"gpu: {name!r}: expected the name of a folder, like {device.slug(name) or 'nvidia_h200'}")
    return name


def gpu(text: str) -> Any:
    """Declare the option `--gpu`."""
    return option("--gpu", "NAME", text, callback=_gpu_folder)


Family = Annotated[str, typer.Argument(help="A file of sweeps/ by name, or a .yaml file.")]
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
Configs = Annotated[Path | None, option("--configs", "DIR", "Folder of the config cache.", envvar=CONFIGS)]
Results = Annotated[Path | None, option("--results", "DIR", "Folder of the records.", envvar=RESULTS)]
Workers = Annotated[int | None, count("--workers", "Processes that compile; one per CPU core if not given.")]
Accept = Annotated[list[str] | None, option("--accept", "TEXT", "Let findings that have TEXT pass; may be repeated.")]
Output = Annotated[Path | None, option("--output -o", "FILE", "Write to this file instead.")]


_SELECTING = {"op": OpNames, "case": CaseNames, "dtype": Dtypes, "quant": Quants, "variant": VariantNames}


def ungrouped(without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace each parameter of a command that is a group of options by the options: a Selection, or a dataclass of options.

    without: the options among `op`, `case`, `dtype`, `quant` and `variant` that the command does not have.
    """
    selecting = [(name, annotation, None) for name, annotation in _SELECTING.items() if name not in without]

    def changed(command: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, tuple[Any, list[str]]] = {}
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            keyword, kind = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY), parameter.annotation
            if not dataclasses.is_dataclass(kind):
                parameters.append(keyword)
                continue
            fields = [(field.name, field.type, field.default) for field in dataclasses.fields(kind)]
            options = selecting if kind is Selection else fields
            groups[parameter.name] = (_selection if kind is Selection else kind), [name for name, _, _ in options]
            parameters += [keyword.replace(name=name, annotation=given, default=usual) for name, given, usual in options]

        @functools.wraps(command)
        def run(**arguments: Any) -> None:
            made = {group: make(**{name: arguments.pop(name) for name in names}) for group, (make, names) in groups.items()}
            command(**made, **arguments)

        vars(run)["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return changed


def _selection(**values: Sequence[str] | None) -> Selection:
    lists: dict[str, Any] = {f"{name}s": tuple(dict.fromkeys(listed or ())) for name, listed in values.items()}
    return Selection(**lists)


def given(group: Any) -> dict[str, Any]:
    """Return the options of a group whose values are not the defaults, by name."""
    fields = {name: f"{name}s" for name in _SELECTING} if isinstance(group, Selection) else {name: name for name in vars(group)}
    values, usual = ({name: getattr(each, field) for name, field in fields.items()} for each in (group, type(group)()))
    return {name: value for name, value in values.items() if value != usual[name]}


def one_of(field: str, value: str, known: Collection[str]) -> str:
    """Return the value if it is known."""
    if value not in known:
        raise unknown(field, value, known, sweep_file.OR_OP if field.split()[-1] == "op" else "")
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


def config_from_json(variant: Variant, field: str, text: str) -> Any:
    """Return the config of a JSON text."""
    try:
        values = decode(text, dict[str, Any])
    except ValueError as error:
        raise ValueError(f"{field}: {text!r}: {error}") from error
    return variant.config_from(values)
