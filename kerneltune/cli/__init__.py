"""Define the command line, one file per command. Only this package prints, and only this package ends the program.

Modules that import torch, numpy or Optuna are imported inside the commands, so that `--help` answers at once.
"""

import errno
import itertools
import mmap
import os
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperGroup, TyperOption

from kerneltune.cli import (
    adopt,
    cache,
    capture,
    cases,
    compare,
    doctor,
    gate,
    inspect,
    loading,
    ops,
    options,
    profile,
    report,
    serve,
    settings,
    sweep,
    trials,
    tune,
)
from kerneltune.cli.console import error_line, show, write_any_character
from kerneltune.errors import warning_line
from kerneltune.processes import interrupts
from kerneltune.processes.start import WorkerStoppedError

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer has its own click, whose UsageError has no public name


_TRACEBACK = "KERNELTUNE_TRACEBACK"
"""Environment variable: whether an error of a command, which may be of this package, has its traceback."""
_RESUMED = ("sweep", "tune")
_MANY_COMMANDS = 6


class _Group(TyperGroup):
    """Turn errors of users and of the library into one line and an exit code."""

    def make_context(self, *arguments: Any, **named: Any) -> Any:
        try:
            return super().make_context(*arguments, **named)
        except _UsageError as error:  # of the options before the command
            raise _refused(error) from None
        except OSError as error:  # of --help and --version
            raise _unwritten(error) from None

    def invoke(self, ctx: Any) -> Any:
        """Run a command; an interrupt ends it with exit code 130, even if another package caught the KeyboardInterrupt.

        SIGTERM to another process of the command alone ends it with 143.
        """
        ended, exit_code = "interrupted", 130
        try:
            result = self._invoke(ctx)
        except WorkerStoppedError as error:
            if not interrupts.heard:
                ended, exit_code = f"error: {error}", 143
        except (KeyboardInterrupt, Exception) as error:
            if not interrupts.heard and not isinstance(error, KeyboardInterrupt):
                raise
        else:
            if not interrupts.heard:
                return result
        interrupts.end()
        kept = ": checks, trials and measurements so far are kept, and the same command goes on from there"
        error_line(f"{ended}{kept if ctx.invoked_subcommand in _RESUMED else ''}")
        raise typer.Exit(exit_code) from None

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyError, IndexError):
            raise  # a bug of this package, so with a traceback
        except _UsageError as error:
            raise _refused(error) from None
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "triton"):
                raise
            error_line(f"error: {error.name}: not installed: `{ctx.invoked_subcommand}` needs it")
            raise typer.Exit(2) from None
        except (ValueError, LookupError) as error:
            if os.environ.get(_TRACEBACK):
                raise
            for text in loading.damaged_classes():  # the sweep file, which lists them, has no other fault
                error_line(f"skipped: {text}")
            if ctx.meta.get(gate.ANNOTATED):
                from kerneltune.gating.report import error_annotation  # slow to import, and --help is to be quick

                show(error_annotation(str(error)))
            error_line(f"error: {error}{settings.source_of(str(error))}")
            raise typer.Exit(2) from None
        except OSError as error:
            raise _unwritten(error) from None


def _unwritten(error: OSError) -> typer.Exit:
    """Print that a file or the current folder cannot be reached, or the output not written, and return the exit.

    Raise any other error again, such as a closed pipe.
    """
    if error.errno in (errno.EACCES, errno.ENAMETOOLONG) and error.filename:
        error_line(f"error: cannot read {error.filename}: {error.strerror}")
    elif error.errno in (errno.ENOSPC, errno.EIO):
        error_line(f"error: cannot write the output: {error.strerror}")
    elif error.errno == errno.ENOENT and not error.filename:
        error_line("error: cannot find the current folder: it was removed or renamed")
    else:
        raise error
    return typer.Exit(2)


def _refused(error: Exception) -> typer.Exit:
    """Print the message of typer about a wrong use, unless typer has just shown the help; return the exit."""
    text: str = getattr(error, "format_message", error.__str__)()
    parsing_errors = getattr(error.__cause__ or error.__context__, "errors", None)
    if parsing_errors:  # of pydantic, whose text lacks the value
        place, _, expected = text.partition(": ")
        text = f"{place}: {parsing_errors()[0]['input']!r}: {expected}"
    option, missing = getattr(error, "option_name", None), getattr(getattr(error, "param", None), "name", None)
    if option is not None and hasattr(error, "possibilities"):
        text = f"{text.rstrip('.')}{_argument(option, getattr(error, 'ctx', None)) or _holders(option)}"
    elif missing == "family" and text.startswith("Missing"):
        text = loading.missing_family()
    if text:
        error_line(f"error: {text}")
    return typer.Exit(2)


def _argument(option: str, ctx: Any) -> str:
    """Return `; family is an argument: sweep FAMILY`, if the command has an argument of the option's name; else nothing."""
    name = option.lstrip("-")
    arguments = [parameter.name for parameter in ctx.command.params if isinstance(parameter, TyperArgument)] if ctx else []
    return f"; {name} is an argument: {ctx.info_name} {name.upper()}" if name in arguments else ""


def _holders(option: str) -> str:
    """Return `; sweep and tune have it`, the commands that have an option; empty if no command has the option."""
    whole: Any = typer.main.get_command(app)
    commands = dict(whole.commands)
    for name in ("cache", "adopt"):
        commands |= {f"{name} {inner}": command for inner, command in commands.pop(name).commands.items()}
    holders = [name for name, command in commands.items() if any(option in parameter.opts for parameter in command.params)]
    if not holders or len(holders) > _MANY_COMMANDS:
        return ""
    return f"; {' and '.join(filter(None, [', '.join(holders[:-1]), holders[-1]]))} {'has' if len(holders) == 1 else 'have'} it"


_value_type: Any = getattr(TyperOption, "display_type_rich", None)
"""Typer's function that returns a value's type in help; None in versions without types in help."""


def _needed_type(parameter: TyperArgument | TyperOption, ctx: Any) -> str | None:
    """Return the type that help shows for an option; None for an argument, whose name tells its type, and for a flag."""
    is_named = isinstance(parameter, TyperArgument) or parameter.is_flag
    return None if is_named else str(_value_type(parameter, ctx))


for _kind in (TyperArgument, TyperOption) if _value_type is not None else ():
    setattr(_kind, "display_type_rich", _needed_type)  # noqa: B010 - mypy takes a method for no variable

app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Check, tune and compare GPU kernels, ship the best configs, and stop a regression at the gate.",
    epilog="Environment: KERNELTUNE_CONFIGS (config cache), KERNELTUNE_RESULTS (records), KERNELTUNE_PLUGINS (modules with "
    "operators, separated by `:`), KERNELTUNE_STRICT=1 (a miss of the cache is an error), KERNELTUNE_LOG_MISSES (file that "
    "misses are appended to), KERNELTUNE_TRACEBACK=1 (errors with their place in the code), NO_COLOR.",
)
_WORK, _LOOK, _SHIP = "Work", "Look", "Ship"
_ROOT_OPTIONS = "Also here: --plugin MODULE, which loads operators, and --captured DIR; see kerneltune --help."
for _name, _function, _panel in (
    ("sweep", sweep.command, _WORK),
    ("tune", tune.command, _WORK),
    ("cases", cases.command, _WORK),
    ("capture", capture.command, _WORK),
    ("serve", serve.command, _WORK),
    ("compare", compare.command, _LOOK),
    ("report", report.command, _LOOK),
    ("trials", trials.command, _LOOK),
    ("inspect", inspect.command, _LOOK),
    ("profile", profile.command, _LOOK),
    ("ops", ops.command, _LOOK),
    ("doctor", doctor.command, _LOOK),
    ("gate", gate.command, _SHIP),
):
    app.command(_name, rich_help_panel=_panel, epilog=_ROOT_OPTIONS)(_function)
app.add_typer(cache.app, name="cache", rich_help_panel=_SHIP)
app.add_typer(adopt.app, name="adopt", rich_help_panel=_LOOK)
_groups = (app, cache.app, adopt.app)
for _command in itertools.chain.from_iterable(group.registered_commands for group in _groups):
    # each paragraph becomes one line, because typer would keep the line breaks of the source
    _paragraphs = ((_command.callback and _command.callback.__doc__) or "").split("\n\n")
    _command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in _paragraphs)


def _version(is_asked: bool) -> None:
    if is_asked:
        from importlib import metadata  # slow to import, and --help is to be quick

        try:
            show(f"kerneltune {metadata.version('kerneltune')}")
        except metadata.PackageNotFoundError:
            show("kerneltune, a source tree that is not installed")
        raise typer.Exit


@app.callback()
def _root(
    plugin: Annotated[
        list[str] | None,
        options.option("--plugin", "MODULE", "Load operators from this module or .py file, too; may be repeated."),
    ] = None,
    captured: Annotated[
        str | None,
        options.option("--captured", "DIR", "Use operators, records and configs of this capture, family DIR/sweep.yaml."),
    ] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    settings.apply()
    if captured and not loading.capture_folder(captured):
        raise ValueError(f"{captured}: no capture: expected a folder that `kerneltune capture` wrote")
    options.use_capture(captured or "")
    if plugin:
        loading.use_plugins(plugin)


def show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object) -> None:
    """Print a warning on a line, once; a warning may be shown again after 100,000 others."""
    line = warning_line(message, category, filename, lineno)
    key = hash(line).to_bytes(8, "little", signed=True)
    place = hash(line) % (len(_SHOWN) // 8) * 8
    if _SHOWN[place : place + 8] != key:
        _SHOWN[place : place + 8] = key
        error_line(line)


_SHOWN = mmap.mmap(-1, 1 << 19)
"""The hash of each warning that was shown, at a place that follows from it. Forked processes share it."""


def main() -> None:
    """Run the command line and exit: 0 done, 1 a check or the gate failed, 2 bad input, 3 ambiguous, 130 interrupted.

    SIGTERM, which batch systems and `timeout` send, has the effect of Ctrl-C. If another process of the command alone gets
    it, the exit code is 143.
    """
    try:
        interrupts.take()
        warnings.showwarning = show_warning
        write_any_character()
        app(_root_options_first(sys.argv[1:]))
    except KeyboardInterrupt:  # before or after a command
        sys.exit(130)


def _root_options_first(arguments: list[str]) -> list[str]:
    """Return the arguments with `--plugin X` and `--captured X` moved to the front from any place before a `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    root_options: list[str] = []
    others: list[str] = []
    waiting = iter(arguments[:end])
    for argument in waiting:
        name, equals, _ = argument.partition("=")
        if name not in ("--plugin", "--captured"):
            others.append(argument)
        elif equals:
            root_options.append(argument)
        else:
            value = next(waiting, None)
            if value is None:
                return [argument]  # typer says that its value is missing
            root_options += [argument, value]
    return [*root_options, *others, *arguments[end:]]
