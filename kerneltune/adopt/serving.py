"""Serve: `Autotuner.run` launches the config of the table, and never times anything.

A launch costs the host a key and a look-up. The choice depends on the key alone: the values of the author's key, the
element types, and the sizes that decide between rows of the table. All other arguments may change from launch to launch.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from kerneltune.adopt import program
from kerneltune.adopt.configs import config_index, config_label, configs_digest, encode_config, live_config
from kerneltune.adopt.counters import Counters
from kerneltune.adopt.kernels import Call, KernelName, KeyPlan, bytecode_digest, kernel_name, plan_key, source_digest
from kerneltune.adopt.table import Group, RowFinder, ServingRow, ServingTable, TableKernel, read_table

if TYPE_CHECKING:
    from kerneltune.adopt.ahead import Preparation
    from kerneltune.adopt.recorder import Recorder

log = logging.getLogger("kerneltune.adopt")

MOST_REMEMBERED, _MOST_LISTS = 4096, 64


SERVED, MISSED = "served", "missed"
"""Kinds of counted launches: with a config of the table, or with a config of the miss policy."""


def counted_name(kernel: str, kind: str) -> str:
    """Return the name under which a kernel's launches are counted."""
    return f"{kind} {kernel}"


@dataclass(slots=True)
class Served:
    """Config of the launches of a key.

    Attributes:
        config: the live config object.
        options: its values as keyword arguments.
        hook: its pre_hook.
        fallbacks: configs that a launch falls back to.
        counter: place of the count of these launches.
    """

    config: Any
    options: dict[str, Any]
    hook: Callable[[dict[str, Any]], Any] | None
    fallbacks: list[Any]
    counter: int


@dataclass(slots=True)
class ServingState:
    """State of an autotuner with a list of configs.

    Attributes:
        kernel: the table's kernel; None where the table has none for this autotuner.
        configs: the author's list.
        shown: the list that the autotuner shows: the author's, or its portfolio. Any other list was assigned by the program.
        counters: places of the counts of launches: served, missed.
        groups: the table's groups by author's key and element types.
        index: configs by their values.
        plans: keys and their served configs, by the names and types of a launch's arguments.
        finders: by the names and types of a launch's arguments, a key without sizes and its RowFinder, None if the table
            lacks the key.
        rows: the configs of the table's rows, by identity of the row.
        lists: states for lists that the program assigned later, by the configs and by their identities.
        choices: the author's choices from a list that the program assigned, because the autotuner's own cache does not tell
            lists apart.
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

    @property
    def deciding(self) -> set[str]:
        """Return the arguments whose values or shapes decide between rows of the table."""
        return {name.partition(".")[0] for group in self.groups.values() for name in group.split}


@dataclass(slots=True)
class Counts:
    """Numbers of keys that were found in the table, of keys that were not, and of runs of the author's tuning."""

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
            missing: records launches that the table does not have.
            portfolio: number of configs that torch.compile sees.
            preparing: begun when a table is read, waited for at the first launch of each key.
            counters: counts of launches by kernel.
        """
        self.root, self.miss, self.manifest, self.missing, self.portfolio = root, miss, manifest, missing, portfolio
        self.counts, self._preparing = Counts(), preparing
        self.counters = counters or Counters(None)
        self._make_config = make_config
        self._lock = RLock()
        self._table: ServingTable | None = None
        self._by_name: dict[tuple[str, str], list[TableKernel]] = {}
        self._read_for = ""
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Warn once of each thing."""
        if text not in self._said:
            self._said.add(text)
            log.warning("kerneltune: %s", text)

    def table(self, is_early: bool = False) -> ServingTable | None:
        """Return the table of this GPU; None if no table may be served.

        is_early: before the program launches anything, when CUDA may not be started.

        Raises:
            ValueError: the manifest names another table; under the policy `error` also that it is damaged.
        """
        with self._lock:
            device = program.early_device_slug() if is_early else program.device_slug()
            if device and device != self._read_for:
                self._table = self._read(device)
                self._read_for = device
                if self._table is not None and self._preparing is not None:
                    self._preparing.begin()
                self._by_name = {}
                for kernel in self._table.kernels if self._table else ():
                    self._by_name.setdefault((kernel.module, kernel.name), []).append(kernel)
            return self._table

    def _read(self, device: str) -> ServingTable | None:
        try:
            table = read_table(self.root, device)
        except ValueError as error:
            if self.manifest or self.miss == "error":
                raise
            self.say(f"nothing is served: {error}")
            return None
        if table is None:
            found = sorted(path.stem for path in (self.root / "served").glob("*.json") if path.stem != "manifest")
            self.say(f"nothing is served: {self.root} has no table for {device}, only for {', '.join(found) or 'no GPU'}")
        digest = table.digest if table else "none"
        if self.manifest and not digest.startswith(self.manifest):
            raise ValueError(f"manifest: {self.manifest}: the table in {self.root} has SHA-256 {digest}")
        if table is not None:
            log.info("kerneltune: serving %d kernels of %s, SHA-256 %s", len(table.kernels), device, digest)
        return table

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
            served = None if plan is None else plan.found.get(plan.key(values))
            if served is None:
                result = self._resolve(original, Call(autotuner, args, kwargs), state, kind, values)
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

    def kernels_of(self, name: KernelName, is_early: bool = False) -> list[TableKernel]:
        """Return the table's kernels of a name; none where no table may be served."""
        with self._lock:
            return [] if self.table(is_early) is None else self._by_name.get(_table_name(name.module, name.name), [])

    def attach(self, autotuner: Any, is_early: bool = False) -> ServingState:
        """Find the table's kernel of an autotuner; torch.compile sees the portfolio from here on."""
        with self._lock:
            state: ServingState | None = autotuner.__dict__.get("kerneltune_state")
            if state is None:
                kernel = self._kernel_or_none(autotuner, is_early)
                state = ServingState(kernel, autotuner.configs, autotuner.configs, self._counters_of(autotuner))
                if kernel is not None and kernel.portfolio and self.portfolio:
                    state.shown = self._live(state, kernel.portfolio[: self.portfolio]) or autotuner.configs
                    autotuner.configs = state.shown
                autotuner.kerneltune_state = state
            return state

    def _kernel_or_none(self, autotuner: Any, is_early: bool) -> TableKernel | None:
        """Return the table's kernel of an autotuner; None, after one line, where looking for it fails.

        Raises:
            Exception: the look-up failed, and the program asked for this table alone: by a manifest or the policy `error`.
        """
        try:
            return self._kernel_of(autotuner, is_early)
        except Exception as error:  # a damaged table must not end the user's program
            if self.manifest or self.miss == "error":
                raise
            self.say(f"{kernel_name(autotuner).text}: not served: {type(error).__name__}: {' '.join(str(error).split())[:150]}")
            return None

    def _counters_of(self, autotuner: Any) -> tuple[int, int]:
        name = kernel_name(autotuner).text
        return self.counters.slot(counted_name(name, SERVED)), self.counters.slot(counted_name(name, MISSED))

    def _relisted(self, autotuner: Any, first: ServingState) -> ServingState:
        """Return the state of an autotuner with the list of configs that the program has assigned to it."""
        with self._lock:
            configs = autotuner.configs
            key = tuple(map(id, configs))
            state = first.lists.get(key)
            if state is None:
                equal = tuple(configs)  # also of configs that the program makes anew for each launch
                state = first.lists.get(equal)
            if state is None:
                if len(first.lists) >= 2 * _MOST_LISTS:
                    first.lists.clear()
                state = ServingState(self._kernel_of(autotuner, False), configs, configs, first.counters, choices={})
                first.lists[equal] = first.lists[key] = state
            return state

    def made(self, autotuner: Any) -> None:
        """Give an autotuner its portfolio before anything traces it."""
        name = kernel_name(autotuner)
        with suppress(Exception):  # raised again where the program launches the kernel
            if self.kernels_of(name, is_early=True):
                self.attach(autotuner, is_early=True)

    def _kernel_of(self, autotuner: Any, is_early: bool) -> TableKernel | None:
        name = kernel_name(autotuner)
        found = [kernel for kernel in self.kernels_of(name, is_early) if not kernel.is_plain]
        same = [kernel for kernel in found if kernel.bytecode == bytecode_digest(autotuner.base_fn)]
        if found and not same:  # another Python, or other code
            same = [kernel for kernel in found if kernel.source == source_digest(autotuner.base_fn)]
        if not same:
            if found:
                self.say(f"{name.text}: its source has changed since it was tuned: policy {self.miss}")
            return None
        package = program.version_of(name.module)
        kernel = next((one for one in same if one.configs == configs_digest(autotuner.configs)), same[0])
        if kernel.package and package and kernel.package != package:
            self.say(f"{name.text}: tuned with version {kernel.package} of its package, here is {package}: policy {self.miss}")
            return None
        return kernel

    def _live(self, state: ServingState, stored: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the live config objects of stored configs, without the configs that cannot be made here.

        Of a list that was not tuned, as programs assign for each size, a value that no config of it has may be wrong here.
        """
        found = [live_config(state.index, config, self._make_config) for config in stored]
        is_tuned = state.kernel is not None and state.kernel.configs == configs_digest(state.configs)
        return [config for config in found if config is not None and (is_tuned or _has_values_of(config, state.configs))]

    def _resolve(
        self, original: Callable[..., Any], call: Call, state: ServingState, kind: tuple[Any, ...], values: tuple[Any, ...]
    ) -> "Served | tuple[Any]":
        """Return the config for launches of this key, or the result of the launch where the author's autotuner made it.

        kind, values: names and types of the launch's arguments, and the arguments with the grid.
        """
        if self._preparing is not None:
            self._preparing.wait()
        plan = state.plans.get(kind) or self._plan(call, state, kind)
        key = plan.key(values)
        row = _row(call, state, kind, values) if state.groups else None
        if row is not None and (served := self._allowed(call, state, row)) is not None:
            self.counts.hits += 1
            return _remember(plan, key, served)
        if len(state.configs) == 1:  # nothing to choose
            return _remember(plan, key, _served(state.configs, state.counters[0]))
        if _launches_nothing(call, state.configs[0]):  # a later launch of this key may launch something
            return _served(state.configs[:1], state.counters[1])
        self.counts.misses += 1
        self._record_miss(call, state)
        policy = "nearest" if self.miss == "author" and program.is_capturing() else self.miss
        if policy == "error":
            raise LookupError(f"{call.name.text}: no config for {call.sizes()} {call.dtypes()} on {program.device_slug()}")
        if policy == "author":
            return self._by_author(original, call, state, plan, key)
        return _remember(plan, key, _served(self._guess(policy, call, state), state.counters[1]))

    def _plan(self, call: Call, state: ServingState, kind: tuple[Any, ...]) -> KeyPlan[Served]:
        """Decide how keys are made of launches whose arguments have these names and types.

        The author's pruning and the policy `nearest` may depend on every argument.
        """
        tuner = call.autotuner
        is_whole = bool(tuner.early_config_prune or tuner.perf_model or self.miss == "nearest")
        if len(state.plans) >= MOST_REMEMBERED:
            state.plans.clear()
        state.finders[kind] = plan_key(call.names, call.values, set(tuner.keys), False)
        plan = state.plans[kind] = plan_key(call.names, call.values, {*tuner.keys, *state.deciding}, is_whole)
        return plan

    def _allowed(self, call: Call, state: ServingState, row: ServingRow) -> Served | None:
        """Return the configs of a row that the author's pruning allows for a launch, whatever a performance model says."""
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
        by_author = call.pruned(state.configs)
        nearest = state.kernel.nearest(call.sizes(), call.dtypes()) if policy == "nearest" and state.kernel is not None else None
        near = None if nearest is None else self._allowed(call, state, nearest)
        used = (
            f"the config of the nearest captured launch, {config_label(encode_config(near.config))}"
            if near
            else "the author's first"
        )
        self.say(f"{call.name.text}: a launch that was not tuned: served with {used}")
        return [*([near.config, *near.fallbacks] if near else ()), *by_author]

    def _by_author(
        self, original: Callable[..., Any], call: Call, state: ServingState, plan: KeyPlan[Served], key: tuple[Any, ...]
    ) -> tuple[Any]:
        """Have the author's autotuner launch, tuning if it must, and remember its choice."""
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
        _remember(plan, key, _served([alone.best_config], state.counters[1]))
        return (result,)

    def _record_miss(self, call: Call, state: ServingState) -> None:
        """Record a launch that was not tuned, with the author's list rather than the portfolio."""
        if self.missing is not None:
            try:
                self.missing.record(call.twin(state.configs), call.args, call.kwargs)
            except Exception as error:  # a log that cannot be written is no reason to stop
                self.say(f"misses are not recorded: {error}")

    def _fall_back(self, autotuner: Any, served: Served, error: Exception) -> None:
        """Serve the next config from now on, because the present config fails to launch."""
        failed, config = served.config, served.fallbacks.pop(0)
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        bad, good = (config_label(encode_config(one)) for one in (failed, config))
        self.say(f"{kernel_name(autotuner).text}: config {bad} fails here ({said}): falling back to {good}")
        served.config, served.options, served.hook = config, config.all_kwargs(), config.pre_hook


def _row(call: Call, state: ServingState, kind: tuple[Any, ...], values: tuple[Any, ...]) -> ServingRow | None:
    """Return the table's row of a launch; None where the table has none for its author's key and element types."""
    plan = state.finders[kind]
    key = plan.key(values)
    try:
        finder = plan.found[key]
    except KeyError:
        group = state.groups.get(repr((call.author_key(), call.dtypes())))
        if len(plan.found) >= MOST_REMEMBERED:
            plan.found.clear()
        finder = plan.found[key] = None if group is None else RowFinder(group)
    return None if finder is None else finder.nearest([plan.size(values, name) for name in finder.names])


def _served(configs: Sequence[Any], counter: int) -> Served:
    config, *fallbacks = configs
    return Served(config, config.all_kwargs(), config.pre_hook, fallbacks, counter)


def _remember(plan: KeyPlan[Served], key: tuple[Any, ...], served: Served) -> Served:
    """Serve a config to all launches of a key from now on."""
    if len(plan.found) >= MOST_REMEMBERED:
        plan.found.clear()
    plan.found[key] = served
    return served


def _launches_nothing(call: Call, config: Any) -> bool:
    """Return whether a launch has an empty grid: of no tokens, say. Any config will do."""
    try:
        grid, _ = call.launched_with(config)
    except Exception:  # the author's own code: it is raised again by the launch
        return False
    return grid is not None and 0 in grid


def _has_values_of(config: Any, configs: Sequence[Any]) -> bool:
    """Return whether each argument that a config gives has that value in one of a list."""
    return all(any(other.kwargs.get(name) == value for other in configs) for name, value in config.kwargs.items())


def _table_name(module: str, name: str) -> tuple[str, str]:
    return ("__main__" if module == "__mp_main__" else module), name
