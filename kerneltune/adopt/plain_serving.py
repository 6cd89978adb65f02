"""Serve kernels without an autotuner: launches that the table has get its options and blocks, others stay as they are.

The key of a launch holds every argument but floats and the arguments that the capture ignored.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kerneltune.adopt import program
from kerneltune.adopt.kernels import Call, KernelName, bytecode_digest, configs_digest, decode_config
from kerneltune.adopt.keys import KeyPlan, plan_key
from kerneltune.adopt.serving import MISSED, MOST_REMEMBERED, SERVED, Server, counted_name
from kerneltune.adopt.spaces import OPTIONS, plain_tuner
from kerneltune.adopt.table import ServingRow, TableKernel


@dataclass(slots=True)
class ServedOptions:
    """Options and blocks in which launches of a key differ from the program's; the place of the count of these launches."""

    options: dict[str, Any]
    counter: int


@dataclass(slots=True)
class PlainState:
    """The table's kernels of a function, one for each choice of options; its keys by the names and types of arguments."""

    name: str
    kernels: list[TableKernel]
    plans: dict[tuple[Any, ...], KeyPlan[ServedOptions]] = field(default_factory=dict)


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
            plan = state.plans.get(kind := (*kwargs, *map(type, values)))
            served = None if plan is None else plan.found.get(plan.key(values))
            if served is None:
                served = self._resolve(state, kernel, args, kwargs, kind)
            count(served.counter)
            if not served.options:
                return original(kernel, *args, **kwargs)
            try:
                return original(kernel, *args, **{**kwargs, **served.options})
            except Exception as error:  # Triton's launch errors share no type
                if not program.is_launch_failure(error):
                    raise
                self._server.say(f"{state.name}: {served.options} fail here ({type(error).__name__}): the program's options")
                served.options = {}
                return original(kernel, *args, **kwargs)

        return run

    def _find(self, function: Any) -> PlainState | None:
        """Return the state of a function; None where the table has no kernel of it."""
        name = KernelName(function.__module__, function.__qualname__)
        found = [one for one in self._server.kernels_of(name) if one.is_plain and one.bytecode == bytecode_digest(function)]
        state = self._states[function] = PlainState(name.text, found) if found else None
        return state

    def _resolve(
        self, state: PlainState, kernel: Any, args: Sequence[Any], kwargs: Mapping[str, Any], kind: tuple[Any, ...]
    ) -> ServedOptions:
        """Return what is served to launches of a key from now on: nothing where the table has no row for it."""
        names, values = (*kernel.arg_names[: len(args)], *kwargs), (*args, *kwargs.values())
        plan = state.plans.get(kind)
        if plan is None or len(plan.found) >= MOST_REMEMBERED:
            deciding = {*OPTIONS, "grid", *(key for one in state.kernels for key in one.keys)}
            plan = state.plans[kind] = plan_key(names, values, deciding, False)
        options = self._options(state, kernel, args, kwargs)
        counter = self._server.counters.slot(counted_name(state.name, SERVED if options else MISSED))
        served = plan.found[plan.key(values)] = ServedOptions(options, counter)
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
