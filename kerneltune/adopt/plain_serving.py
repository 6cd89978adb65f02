"""Serve kernels without an autotuner: launches that the table has run with its options, all other launches stay unchanged.

The key of a launch holds every argument but floats and the arguments that the capture ignored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kerneltune.adopt import program
from kerneltune.adopt.configs import OPTIONS, configs_digest, decode_config, plain_tuner
from kerneltune.adopt.kernels import Call, KernelName, KeyPlan, bytecode_digest, plan_key
from kerneltune.adopt.serving import MISSED, MOST_REMEMBERED, SERVED, Server, counted_name
from kerneltune.adopt.table import ServingRow, TableKernel

_MOST_PLANS = 8
"""Plans of keys that are kept of launches with the same argument names: with and without each optional tensor."""


@dataclass(slots=True)
class ServedOptions:
    """Options and blocks of the launches of a key.

    Attributes:
        options: keyword arguments that take the place of the program's; empty where the table has none.
        own: the program's keyword arguments of these names.
        counter: place of the count of these launches.
    """

    options: dict[str, Any]
    own: dict[str, Any]
    counter: int


@dataclass(slots=True)
class PlainState:
    """The table's kernels of a function, one for each choice of options.

    Attributes:
        plans: keys of launches by the number of positional arguments and the keywords; several where the types differ.
    """

    name: str
    kernels: list[TableKernel]
    plans: dict[tuple[Any, ...], list[KeyPlan[ServedOptions]]] = field(default_factory=dict)


class PlainServer:
    """Change the launches of kernels without an autotuner that the table of a Server has."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._states: dict[Any, PlainState | None] = {}

    def make_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of `run` of a kernel."""
        count, states = self._server.counters.add, self._states

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                state = states[kernel.fn]
            except KeyError:
                state = self._find(kernel.fn)
            if state is None:
                return original(kernel, *args, **kwargs)
            values = (*args, *kwargs.values())
            for plan in state.plans.get((len(args), *kwargs), ()):
                try:
                    served = plan.found[plan.key(values)]
                    break
                except (KeyError, AttributeError, TypeError):  # the plan is of launches with other types
                    pass
            else:
                served = self._resolve(state, kernel, args, kwargs)
            count(served.counter)
            kwargs.update(served.options)
            try:
                return original(kernel, *args, **kwargs)
            except Exception as error:  # Triton's launch errors share no type
                if not served.options or not program.is_launch_failure(error):
                    raise
                self._server.say(f"{state.name}: {served.options} fail here ({type(error).__name__}): the program's options")
                kwargs = {name: value for name, value in kwargs.items() if name not in served.options} | served.own
                served.options = {}
                return original(kernel, *args, **kwargs)

        return run

    def _find(self, function: Any) -> PlainState | None:
        """Return the state of a function; None where the table has no kernel of it."""
        name = KernelName(function.__module__, function.__qualname__)
        found = [one for one in self._server.kernels_of(name) if one.is_plain and one.bytecode == bytecode_digest(function)]
        state = self._states[function] = PlainState(name.text, found) if found else None
        return state

    def _resolve(self, state: PlainState, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ServedOptions:
        """Serve the options of the table to launches of this key from now on; no options where the table has no row."""
        names, values = (*kernel.arg_names[: len(args)], *kwargs), (*args, *kwargs.values())
        deciding = {*OPTIONS, "grid", *(key for one in state.kernels for key in one.keys)}
        made: KeyPlan[ServedOptions] = plan_key(names, values, deciding, is_typed=True)
        plans = state.plans.setdefault((len(args), *kwargs), [])
        plan = next((one for one in plans if one.parts == made.parts), made)
        if plan is made or len(plan.found) >= MOST_REMEMBERED:
            plans[:] = [made, *(one for one in plans[: _MOST_PLANS - 1] if one is not plan)]
            plan = made
        try:
            options = self._options(state, kernel, args, kwargs)
        except Exception as error:  # a value of a kind that no capture has must not end the user's program
            self._server.say(f"{state.name}: a launch is not served: {type(error).__name__}: {error}")
            options = {}
        counter = self._server.counters.slot(counted_name(state.name, SERVED if options else MISSED))
        own = {name: kwargs[name] for name in options if name in kwargs}
        served = plan.found[plan.key(values)] = ServedOptions(options, own, counter)
        return served

    def _options(self, state: PlainState, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options and blocks that the table has for a launch; empty for none."""
        own = {name: kwargs.get(name) for name in OPTIONS}
        given = {name: value for name, value in kwargs.items() if name not in OPTIONS}
        for stored in state.kernels:
            tuner = plain_tuner(kernel, own, stored.keys)
            if configs_digest(tuner.configs) == stored.configs:
                call = Call(tuner, args, given)
                row = stored.row(call.author_key(), call.sizes(), call.dtypes())
                if row is not None and _fits(call, row):
                    chosen = decode_config(row.configs[0], type(tuner.configs[0])).all_kwargs()
                    return {name: value for name, value in chosen.items() if name in own or call.named[name] != value}
        return {}


def _fits(call: Call, row: ServingRow) -> bool:
    """Return whether the config of a row fits a launch: other blocks need the grid that was checked with them.

    Another place of the program may launch this kernel with a grid that does not read the blocks.
    """
    config = row.configs[0]
    changed = {name for name, size in config["kwargs"].items() if call.named.get(name) != size}
    if not changed:
        return True
    if not callable(call.kwargs.get("grid")) or not changed <= call.kwargs.keys():
        return False
    try:
        grid, _ = call.launched_with(decode_config(config, type(call.autotuner.configs[0])))
    except Exception:  # the program's own code
        return False
    return grid is not None and list(grid) == row.evidence.get("grid")
