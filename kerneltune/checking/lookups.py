"""Check the look-up of a config: that a call without `config=` looks up the case that a sweep tunes, and gives right outputs."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from kerneltune.cache import Chooser
from kerneltune.checking.check import Checker, host_folder
from kerneltune.checking.covering import Setting, settings
from kerneltune.errors import first_line, statement_in
from kerneltune.interpreter.modes import replaced
from kerneltune.spec import Case, Op, Variant
from kerneltune.task import Outcome

_CALL = "a call without `config=`"


def look_up_failures(op: Op, variant: Variant, checkers: Mapping[Case, Checker]) -> list[Outcome]:
    """Return the first failure of `variant.run(inputs, None)`, on a case for each type, mode and value of an option.

    A variant without knobs, a captured kernel, and a `run` that looks nothing up have no failures.
    """
    if variant.config is None or op.kind == "captured":
        return []
    seen = set[Setting]()
    for case in (case for case in checkers if all(case.sizes.values())):
        if not seen.issuperset(settings(case)) and (lines := _errors(op, variant, case, checkers[case])):
            return [Outcome("failed", line, None, case) for line in lines]
        seen.update(settings(case))
    return []


def _errors(op: Op, variant: Variant, case: Case, checker: Checker) -> list[str]:
    looked_up: list[Case] = []

    def note(chooser: Chooser, case: Case) -> None:
        if (chooser.op.name, chooser.variant.name) == (op.name, variant.name):
            looked_up.append(case)

    with before_look_ups(note):
        try:
            outputs = checker.outputs(variant, None)
        except Exception as error:  # the author's code may fail in any way
            if not looked_up and Chooser.__name__ not in str(error):  # `run` needs a config, and has no look-up
                return []
            return [f"{_CALL} fails: {statement_in(host_folder(op), error)}{first_line(error)}"]
    tuned = op.case_of_call(case)
    if looked_up and _without_free_options(op, tuned) not in [_without_free_options(op, asked) for asked in looked_up]:
        untold = [name for name, value in tuned.options if (name, value) not in looked_up[0].options]
        hint = f"; an option that no argument of a call tells belongs in free_options: {', '.join(untold)}" if untold else ""
        return [f"{_CALL} looks up {looked_up[0].label}, where configs are stored for {tuned.label}{hint}"]
    return [f"{_CALL}: {line}" for line in checker.disagreements(outputs)] if looked_up else []


def before_look_ups(act: Callable[[Chooser, Case], None]) -> AbstractContextManager[None]:
    """Call a function with the chooser and the case of each look-up within; its exception takes the place of the look-up."""
    choose = Chooser.__call__

    def look_up(chooser: Chooser, *arguments: Any, **named: Any) -> Any:
        try:
            case = Case("", *arguments, **{name: value for name, value in named.items() if name != "gpu"})
        except TypeError:  # wrong arguments: the look-up itself raises
            return choose(chooser, *arguments, **named)
        act(chooser, case)
        return choose(chooser, *arguments, **named)

    return replaced({(Chooser, "__call__"): look_up})


def _without_free_options(op: Op, case: Case) -> Case:
    """Return a case without its name and free options: calls with another value of a free option share configs."""
    return replace(case, name="", options=tuple(option for option in case.options if option[0] not in op.free_options))
