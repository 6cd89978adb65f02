"""Launch kernels with the configs of the table, and time nothing.

A launch costs the host a key and a look-up. The key of an autotuned kernel holds the author's key, the element types, and the
sizes that decide between rows of the table. The key of a kernel without an autotuner holds every argument except floats and the
arguments that the capture ignored: a launch that the table lacks stays unchanged.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from kerneltune.adopt import kernels, program
from kerneltune.adopt.configs import OPTIONS, config_index, configs_digest, decode_config, label_of, live_config, plain_tuner
from kerneltune.adopt.folder import Counters
from kerneltune.adopt.kernels import Call, KernelName, KeyPlan, kernel_name, plan_key
from kerneltune.adopt.program import describe_error
from kerneltune.adopt.table import Group, RowFinder, ServingRow, ServingTable, TableKernel, read_table

if TYPE_CHECKING:
    from kerneltune.adopt.ahead import Preparation
    from kerneltune.adopt.recorder import Recorder

log = logging.getLogger("kerneltune.adopt")

_MOST_KINDS, _MOST_LISTS = 4096, 64
_MOST_PLANS = 8
"""Most plans of keys for launches with the same numbers of arguments: a launch with and without an optional tensor has two."""
SERVED, MISSED = "served", "missed"
"""Kinds of launches, with a config of the table or of the miss policy. The name of their count is `KIND KERNEL`."""


@dataclass(slots=True)
class Served:
    """Hold the config of the launches of a key.

    Attributes:
        options: keyword arguments of the launch; of a kernel without an autotuner the arguments that differ from the program's.
        counter: index of the count of these launches.
        config: the live config object; None for a kernel without an autotuner.
        hook: the config's pre_hook.
        fallbacks: configs that replace the config if it fails to launch.
    """

    options: dict[str, Any]
    counter: int
    config: Any = None
    hook: Callable[[dict[str, Any]], Any] | None = None
    fallbacks: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class ServingState:
    """Hold the state of an autotuner with a list of configs.

    Attributes:
        kernel: the table's kernel; None where the table has none for this autotuner.
        configs: the author's list.
        shown: the list that the autotuner shows: the author's, or its portfolio. Any other list was assigned by the program.
        counters: indices of the counts of launches: served, missed.
        groups: the table's groups by author's key and element types.
        index: configs by their values.
        plans: keys and their served configs, by the names and types of a launch's arguments.
        finders: by the same names and types, a key without sizes and its RowFinder, None if the table lacks the key.
        rows: the configs of the table's rows, by identity of the row.
        lists: states for lists that the program assigned later, by the configs and by their identities.
        choices: the author's choices from a list that the program assigned: the autotuner's cache does not tell lists apart.
    """

    kernel: TableKernel | None
    configs: list[Any]
    shown: list[Any]
    counters: tuple[int, int]
    groups: dict[str, Group] = field(default_factory=dict)
    plans: dict[tuple[Any, ...], KeyPlan[Served]] = field(default_factory=dict)
    finders: dict[tuple[Any, ...], KeyPlan[RowFinder | None]] = field(default_factory=dict)
    rows: dict[int, Served] = field(default_factory=dict)
    lists: "dict[tuple[Any, ...], ServingState]" = field(default_factory=dict)
    choices: dict[Any, Any] | None = None
    index: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Index the configs and the groups."""
        self.index = config_index(self.configs)
        for group in self.kernel.groups if self.kernel is not None else ():
            self.groups.setdefault(repr((group.key, list(group.dtypes))), group)


@dataclass(slots=True)
class PlainState:
    """Hold the table's kernels of a function without an autotuner, one for each choice of options.

    Attributes:
        plans: keys of launches by the numbers of positional arguments and of keywords; several where names or types differ.
    """

    name: str
    kernels: list[TableKernel]
    plans: dict[tuple[Any, ...], list[KeyPlan[Served]]] = field(default_factory=dict)


@dataclass(slots=True)
class Counts:
    """Count the keys that were found in the table, the keys that were not found, and the runs of the author's tuning."""

    hits: int = 0
    misses: int = 0
    tunings: int = 0


class Server:
    """Serve a table."""

    def __init__(
        self,
        root: Path,
        make_config: Any,
        miss: str = "author",
        manifest: str = "",
        missing: "Recorder | None" = None,
        portfolio: int = 1,
        preparing: "Preparation | None" = None,
        counters: Counters | None = None,
    ) -> None:
        """Serve the table of a folder.

        Args:
            root: the tuned folder.
            make_config: the class triton.Config.
            miss: one of `startup.POLICIES`.
            manifest: SHA-256 that the table must have, or its beginning.
            missing: recorder of launches that the table does not have.
            portfolio: number of configs that torch.compile sees.
            preparing: preparation that begins when a table is read, and that the first launch of each key waits for.
            counters: counts of launches by kernel.
        """
        self.root, self.miss, self.manifest, self.missing, self.portfolio = root, miss, manifest, missing, portfolio
        self._as_missed = f"its launches follow --miss {miss}, as if they were not tuned"
        self.counts, self.counters = Counts(), counters or Counters(None)
        self._make_config, self._preparing, self._lock = make_config, preparing, RLock()
        self._table: ServingTable | None = None
        self._read_for = ""
        self._said: set[str] = set()
        self._plain: dict[Any, PlainState | None] = {}

    def say(self, text: str) -> None:
        """Log a warning, unless the same text was logged before."""
        if text not in self._said:
            self._said.add(text)
            log.warning("kerneltune: %s", text)

    @property
    def _is_strict(self) -> bool:
        """Return whether the program asked for this table alone, so that a damaged table ends it."""
        return bool(self.manifest) or self.miss == "error"

    def table(self, is_early: bool = False) -> ServingTable | None:
        """Return the table of this GPU; None if no table may be served.

        Raises ValueError if the manifest names another table; under the policy `error` also if the table is damaged.

        is_early: whether the program has launched nothing yet, so that CUDA may not be started.
        """
        with self._lock:
            device = program.early_device_slug() if is_early else program.device_slug()
            if device and device != self._read_for:
                self._table, self._read_for = self._read(device), device
                if self._table is not None and self._preparing is not None:
                    self._preparing.begin()
            return self._table

    def _read(self, device: str) -> ServingTable | None:
        try:
            table = read_table(self.root, device)
        except ValueError as error:
            if self._is_strict:
                raise
            self.say(f"nothing is served: {error}")
            return None
        if table is None:
            found = sorted(path.stem for path in (self.root / "served").glob("*.json") if path.stem != "manifest")
            others = f", only for {', '.join(found)}" if found else ""
            self.say(f"nothing is served: {self.root} has no table for {device}{others}")
        digest = table.digest if table else "none"
        if self.manifest and not digest.startswith(self.manifest):
            raise ValueError(f"manifest: {self.manifest}: the table in {self.root} has SHA-256 {digest}")
        if table is not None:
            log.info("kerneltune: serving %d kernels of %s, SHA-256 %s", len(table.kernels), device, digest)
        return table

    def kernels_of(self, name: KernelName, is_plain: bool = False, is_early: bool = False) -> list[TableKernel]:
        """Return the table's kernels of a name; none where no table may be served."""
        table, wanted = self.table(is_early), (program.main_name(name.module), name.name, is_plain)
        return [one for one in table.kernels if (one.module, one.name, one.is_plain) == wanted] if table is not None else []

    def make_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of Autotuner.run."""
        count = self.counters.add

        def run(autotuner: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                state: ServingState = autotuner.kerneltune_state
            except AttributeError:
                state = self.attach(autotuner)
            if autotuner.configs is not state.shown:
                state = self._relisted(autotuner, state)
            values = (*args, *kwargs.values())
            plan = state.plans.get(kind := (*kwargs, *map(type, values)))
            served = None if plan is None else plan.found.get(plan.key(*values))
            if served is None:
                result = self._resolve(original, Call(autotuner, args, kwargs), state, kind)
                if not isinstance(result, Served):
                    return result[0]
                served = result
            count(served.counter)
            while True:
                if served.hook is not None:
                    served.hook({**dict(zip(autotuner.arg_names, args, strict=False)), **kwargs, **served.options})
                autotuner.best_config = served.config
                try:
                    return autotuner.fn.run(*args, **kwargs, **served.options)
                except Exception as error:  # Triton's launch errors share no type
                    if not served.fallbacks or not program.is_launch_failure(error):
                        raise
                    self._fall_back(autotuner, served, error)

        return run

    def make_plain_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of `run` of kernels, for the kernels without an autotuner."""
        count, states = self.counters.add, self._plain

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                state = states[kernel.fn]
            except KeyError:
                state = states[kernel.fn] = self._plain_state(kernel.fn)
            if state is None:
                return original(kernel, *args, **kwargs)
            for plan in state.plans.get((len(args), len(kwargs)), ()):
                try:
                    served = plan.found[plan.key(*args, **kwargs)]
                    break
                except (KeyError, AttributeError, TypeError):  # the plan is of launches with other names or types
                    pass
            else:
                served = self._resolve_plain(state, Call(kernel, args, kwargs))
            count(served.counter)
            if not served.options:
                return original(kernel, *args, **kwargs)
            try:
                return original(kernel, *args, **(kwargs | served.options))
            except Exception as error:  # Triton's launch errors share no type
                if not program.is_launch_failure(error):
                    raise
                self.say(f"{state.name}: {served.options} fail here ({type(error).__name__}): the program's options")
                served.options = {}
                return original(kernel, *args, **kwargs)

        return run

    def attach(self, autotuner: Any, is_early: bool = False) -> ServingState:
        """Find the table's kernel of an autotuner; torch.compile sees the portfolio from here on."""
        with self._lock:
            state: ServingState | None = autotuner.__dict__.get("kerneltune_state")
            if state is None:
                kernel, name = None, kernel_name(autotuner).text
                try:
                    kernel = self._kernel_of(autotuner, is_early)
                except Exception as error:  # a damaged table must not end the user's program
                    if self._is_strict:
                        raise
                    self.say(f"{name}: not served: {describe_error(error)}")
                served, missed = (self.counters.slot(f"{kind} {name}") for kind in (SERVED, MISSED))
                state = ServingState(kernel, autotuner.configs, autotuner.configs, (served, missed))
                if kernel is not None and kernel.portfolio and self.portfolio:
                    state.shown = self._live(state, kernel.portfolio[: self.portfolio]) or autotuner.configs
                    autotuner.configs = state.shown
                autotuner.kerneltune_state = state
            return state

    def made(self, autotuner: Any) -> None:
        """Give an autotuner its portfolio before anything traces it."""
        with suppress(Exception):  # raised again where the program launches the kernel
            if self.kernels_of(kernel_name(autotuner), is_early=True):
                self.attach(autotuner, is_early=True)

    def _relisted(self, autotuner: Any, first: ServingState) -> ServingState:
        """Return the state of an autotuner with the list of configs that the program has assigned to it."""
        with self._lock:
            configs = autotuner.configs
            key, equal = tuple(map(id, configs)), tuple(configs)  # programs may make equal configs anew for each launch
            state = first.lists.get(key) or first.lists.get(equal)
            if state is None:
                if len(first.lists) >= 2 * _MOST_LISTS:
                    first.lists.clear()
                state = ServingState(self._kernel_of(autotuner, False), configs, configs, first.counters, choices={})
                first.lists[equal] = first.lists[key] = state
            return state

    def _kernel_of(self, autotuner: Any, is_early: bool) -> TableKernel | None:
        name, function = kernel_name(autotuner), autotuner.base_fn
        found = self.kernels_of(name, is_early=is_early)
        same = [one for one in found if one.bytecode == kernels.bytecode_digest(function)]
        same = same or [one for one in found if one.source == kernels.source_digest(function)]  # another Python, or other code
        if not same:
            if found:
                self.say(f"{name.text}: its source has changed since it was tuned: {self._as_missed}")
            return None
        package = program.version_of(name.module)
        kernel = next((one for one in same if one.configs == configs_digest(autotuner.configs)), same[0])
        if kernel.package and package and kernel.package != package:
            other = f"tuned with version {kernel.package} of its package, here is {package}"
            self.say(f"{name.text}: {other}: {self._as_missed}")
            return None
        return kernel

    def _live(self, state: ServingState, stored: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the live config objects of stored configs, without the configs that cannot be made here.

        If the autotuner's list was not tuned, such as a list that the program assigns for each size, configs with a value that no
        config of the list has are left out, because the value may be wrong here.
        """
        made = [live_config(state.index, config, self._make_config) for config in stored]
        live = [config for config in made if config is not None]
        if state.kernel is not None and state.kernel.configs == configs_digest(state.configs):
            return live
        known = [item for config in state.configs for item in config.kwargs.items()]
        return [config for config in live if all(item in known for item in config.kwargs.items())]

    def _resolve(
        self, original: Callable[..., Any], call: Call, state: ServingState, kind: tuple[Any, ...]
    ) -> "Served | tuple[Any]":
        """Return the config for launches of this key, or the result of the launch where the author's autotuner made it.

        kind: names and types of the launch's arguments.
        """
        if self._preparing is not None:
            self._preparing.wait()
        plan = state.plans.get(kind) or self._plan(call, state, kind)
        key = plan.key(*call.values)
        row = _row(call, state, kind) if state.groups else None
        if row is not None and (served := self._allowed(call, state, row)) is not None:
            self.counts.hits += 1
            return plan.remember(key, served)
        if len(state.configs) == 1:  # nothing to choose
            return plan.remember(key, _served(state.configs, state.counters[0]))
        with suppress(Exception):  # of the author's grid: the launch raises it again
            if 0 in (call.grid(state.configs[0]) or ()):  # without tokens, for example: any config does for this launch
                return _served(state.configs[:1], state.counters[1])
        self.counts.misses += 1
        if self.missing is not None:
            try:  # with the author's list rather than the portfolio
                self.missing.record(call.twin(state.configs), call.args, call.kwargs)
            except Exception as error:  # a log that cannot be written is no reason to stop
                self.say(f"misses are not recorded: {error}")
        policy = "nearest" if self.miss == "author" and program.is_capturing() else self.miss
        if policy == "error":
            raise LookupError(f"{call.name.text}: no config for {call.sizes()} {call.dtypes()} on {program.device_slug()}")
        if policy == "author":
            return self._by_author(original, call, state, plan, key)
        return plan.remember(key, _served(self._guess(policy, call, state), state.counters[1]))

    def _plan(self, call: Call, state: ServingState, kind: tuple[Any, ...]) -> KeyPlan[Served]:
        """Return the plan of keys for launches whose arguments have these names and types.

        The author's pruning and the policy `nearest` may depend on every argument.
        """
        tuner, names, values = call.autotuner, call.names, call.values
        is_whole = tuner.early_config_prune or tuner.perf_model or self.miss == "nearest"
        sizes = {name.partition(".")[0] for group in state.groups.values() for name in group.split}  # that decide between rows
        deciding = {*tuner.keys, *sizes, *(kernels.all_but_floats(names, values) if is_whole else ())}
        if len(state.plans) >= _MOST_KINDS:
            state.plans.clear()
        state.finders[kind] = plan_key(names, values, set(tuner.keys))
        plan = state.plans[kind] = plan_key(names, values, deciding)
        return plan

    def _allowed(self, call: Call, state: ServingState, row: ServingRow) -> Served | None:
        """Return the configs of a row that the author's pruning allows for a launch, without the author's performance model."""
        served = state.rows.get(id(row))
        if served is None:
            if not (configs := self._live(state, row.configs)):
                return None
            served = state.rows[id(row)] = _served(configs, state.counters[0])
        if not call.autotuner.early_config_prune:
            return served
        configs = [served.config, *served.fallbacks]
        left = call.pruned(list(dict.fromkeys([*state.configs, *configs])), by_model=False)
        allowed = [config for config in configs if config in left]
        return _served(allowed, state.counters[0]) if allowed else None

    def _guess(self, policy: str, call: Call, state: ServingState) -> list[Any]:
        """Return the configs of the nearest captured launch, or the author's, first config first."""
        nearest = state.kernel.nearest(call.sizes(), call.dtypes()) if policy == "nearest" and state.kernel is not None else None
        near = None if nearest is None else self._allowed(call, state, nearest)
        label = "" if near is None else label_of(near.config)
        used = f"the config of the nearest captured launch, {label}" if near else "the author's first config"
        self.say(f"{call.name.text}: a launch that was not tuned: served with {used}")
        return [*([near.config, *near.fallbacks] if near else ()), *call.pruned(state.configs)]

    def _by_author(
        self, original: Callable[..., Any], call: Call, state: ServingState, plan: KeyPlan[Served], key: tuple[Any, ...]
    ) -> tuple[Any]:
        """Let the author's autotuner tune if necessary and launch, and remember its choice."""
        self.counters.add(state.counters[1])
        self.say(f"{call.name.text}: a launch that was not tuned: the author's autotuner chooses")
        alone = call.twin(state.configs)
        if state.choices is not None:
            alone.cache = state.choices
        before = len(alone.cache)
        result = original(alone, *call.args, **call.kwargs)
        self.counts.tunings += len(alone.cache) > before
        for name in ("best_config", "configs_timings", "bench_time"):
            if name in alone.__dict__:
                setattr(call.autotuner, name, alone.__dict__[name])
        plan.remember(key, _served([alone.best_config], state.counters[1]))
        return (result,)

    def _fall_back(self, autotuner: Any, served: Served, error: Exception) -> None:
        """Serve the next config from now on, because the present config fails to launch."""
        failed, config = served.config, served.fallbacks.pop(0)
        bad, good = (label_of(one) for one in (failed, config))
        self.say(f"{kernel_name(autotuner).text}: config {bad} fails here ({describe_error(error)}): falling back to {good}")
        served.config, served.options, served.hook = config, config.all_kwargs(), config.pre_hook

    def _plain_state(self, function: Any) -> PlainState | None:
        """Return the state of a function; None where the table has no kernel of it."""
        name = KernelName(function.__module__, function.__qualname__)
        found = [one for one in self.kernels_of(name, is_plain=True) if one.bytecode == kernels.bytecode_digest(function)]
        return PlainState(name.text, found) if found else None

    def _resolve_plain(self, state: PlainState, call: Call) -> Served:
        """Serve the options of the table to launches of this key from now on; no options where the table has no row.

        call: launch of the kernel itself instead of an autotuner.
        """
        deciding = {*OPTIONS, "grid", *(key for one in state.kernels for key in one.keys)}
        plan = plan_key(call.names, call.values, deciding, keywords=len(call.kwargs), is_typed=True)
        plans = state.plans.setdefault((len(call.args), len(call.kwargs)), [])
        known = next((other for other in plans if other.parts == plan.parts and other.places == plan.places), None)
        if known is None:
            plans[:] = [plan, *plans[: _MOST_PLANS - 1]]
        try:
            options = self._plain_options(state, call)
        except Exception as error:  # an argument of an unknown type must not end the user's program
            self.say(f"{state.name}: a launch is not served: {describe_error(error)}")
            options = {}
        counter = self.counters.slot(f"{SERVED if options else MISSED} {state.name}")
        return (known or plan).remember(plan.key(*call.args, **call.kwargs), Served(options, counter))

    def _plain_options(self, state: PlainState, call: Call) -> dict[str, Any]:
        """Return the options and blocks of the table for a launch; empty if the table has no row for it."""
        own = {name: call.kwargs.get(name) for name in OPTIONS}
        given = {name: value for name, value in call.kwargs.items() if name not in OPTIONS}
        for stored in state.kernels:
            tuner = plain_tuner(call.autotuner, own, stored.keys)
            if configs_digest(tuner.configs) == stored.configs:
                launch = Call(tuner, call.args, given)
                row = stored.row(launch.author_key(), launch.sizes(), launch.dtypes())
                if row is not None and self._fits(launch, row):
                    chosen = decode_config(row.configs[0], self._make_config).all_kwargs()
                    return {name: value for name, value in chosen.items() if name in own or launch.named[name] != value}
        return {}

    def _fits(self, call: Call, row: ServingRow) -> bool:
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
            grid = call.grid(decode_config(config, self._make_config))
        except Exception:  # the program's own code
            return False
        return grid is not None and list(grid) == row.evidence.get("grid")


def _row(call: Call, state: ServingState, kind: tuple[Any, ...]) -> ServingRow | None:
    """Return the table's row of a launch; None where the table has none for its author's key and element types."""
    plan, values = state.finders[kind], call.values
    key = plan.key(*values)
    if key not in plan.found:
        group = state.groups.get(repr((call.author_key(), call.dtypes())))
        plan.remember(key, None if group is None else RowFinder(group))
    finder = plan.found[key]
    return None if finder is None else finder.nearest([plan.size(values, name) for name in finder.names])


def _served(configs: Sequence[Any], counter: int) -> Served:
    config, *fallbacks = configs
    return Served(config.all_kwargs(), counter, config, config.pre_hook, fallbacks)
