"""Launch kernels with the configs of the table, and time nothing.

A launch costs the host a key and a look-up. The key of an autotuned kernel holds the author's key, the element types, and the
sizes that decide between rows of the table. The key of a kernel without an autotuner holds every argument except floats and the
arguments that the capture ignored: a launch that the table lacks stays unchanged.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kerneltune.adopt import arguments, kernels, program
from kerneltune.adopt.configs import (
    OPTIONS,
    changed_blocks,
    config_index,
    configs_digest,
    decode_config,
    label_of,
    launch_defaults,
    live_config,
    plain_tuner,
    split_options,
)
from kerneltune.adopt.folder import Counters
from kerneltune.adopt.kernels import KernelCall, KernelName, LaunchKeys, kernel_name, of_list
from kerneltune.adopt.program import log, warn_once
from kerneltune.adopt.table import RowFinder, ServingRow, ServingTable, TableKernel, read_table
from kerneltune.errors import first_line
from kerneltune.wording import pairs

if TYPE_CHECKING:
    from kerneltune.adopt.ahead import Preparation
    from kerneltune.adopt.recorder import Recorder

SERVED, MISSED = "served", "missed"
"""Kinds of launches, with a config of the table or of the miss policy. The name of their count is `KIND KERNEL`."""


@dataclass(slots=True)
class Served:
    """Hold the config of the launches of a key.

    Attributes:
        options: keyword arguments of the launch; without an autotuner only the arguments that differ from the program's.
        counter: index of the count of these launches.
        config: the live config object; None for a kernel without an autotuner.
        hook: the config's pre_hook.
        fallbacks: configs that replace the config if it fails to launch; without an autotuner the program's own arguments do.
    """

    options: dict[str, Any]
    counter: int
    config: Any = None
    hook: Callable[[dict[str, Any]], Any] | None = None
    fallbacks: list[Any] = field(default_factory=list)

    def fall_back(self, kernel: Any, error: Exception) -> None:
        """Replace a config that fails to launch by the next config, from now on; raise any other error."""
        if not program.is_launch_failure(error) or not (self.fallbacks if self.config is not None else self.options):
            raise error
        if self.config is None:
            failed, to = pairs(self.options), "the program's own arguments"
            self.options = {}
        else:
            failed, self.config = label_of(self.config), self.fallbacks.pop(0)
            self.options, self.hook, to = self.config.all_kwargs(), self.config.pre_hook, label_of(self.config)
        warn_once(f"{kernel_name(kernel).text}: config {failed} fails here ({first_line(error)}): falling back to {to}")


@dataclass(slots=True)
class ServingState:
    """Hold the state of an autotuner with a list of configs.

    Attributes:
        kernel: the table's kernel; None where the table has none for this autotuner.
        configs: the author's list.
        counters: indices of the counts of launches: served, missed.
        deciding: arguments that are part of `keys`: the arguments of the author's key, and the sizes that decide between rows.
        index: configs by their values.
        shown: the list that the autotuner shows: the author's, or the config for torch.compile. Any other list was assigned by
            the program.
        keys: the served configs by the keys of launches.
        finders: the table's rows by the author's keys and element types of launches.
        rows: the configs of the table's rows, by identity of the row.
        lists: states for lists that the program assigned later.
        choices: the author's choices from a list that the program assigned: the autotuner's cache does not tell lists apart.
    """

    kernel: TableKernel | None
    configs: list[Any]
    counters: tuple[int, ...]
    deciding: set[str]
    index: dict[str, Any]
    shown: list[Any]
    keys: LaunchKeys[Served] = field(default_factory=LaunchKeys)
    finders: LaunchKeys[RowFinder] = field(default_factory=LaunchKeys)
    rows: dict[int, Served] = field(default_factory=dict)
    lists: "dict[Any, ServingState]" = field(default_factory=dict)
    choices: dict[Any, Any] | None = None

    def row(self, call: KernelCall) -> ServingRow | None:
        """Return the table's row of a launch; None where the table has none for its author's key and element types."""
        if self.kernel is None:
            return None
        finder = self.finders.find(call.args, call.kwargs)
        if finder is None:
            finder = self.kernel.finder(call.author_key(), call.dtypes())
            self.finders.remember(call, call.autotuner.keys, finder)
        return finder.nearest({name: call.size(name) for name in finder.names})


@dataclass(slots=True)
class PlainKernel:
    """Serve a kernel without an autotuner.

    Attributes:
        listed: the table's kernels of this code, each with other options of the program.
        slots: indices of the counts of launches: served, missed.
        keys: the served changes by the keys of launches.
        described: by the options of the program, the autotuners that describe the kernel, with the table's kernels.
    """

    listed: list[TableKernel]
    counters: Counters
    slots: tuple[int, ...]
    keys: LaunchKeys[Served] = field(default_factory=LaunchKeys)
    described: dict[tuple[Any, ...], list[tuple[Any, TableKernel]]] = field(default_factory=dict)

    def launch(self, original: Callable[..., Any], kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Launch the kernel with the changes of the launch's key. The hot path of serving."""
        served = self.keys.find(args, kwargs) or self._resolve(KernelCall(kernel, args, kwargs))
        try:
            result = original(kernel, *args, **{**kwargs, **served.options})
        except Exception as error:  # Triton's launch errors share no type
            served.fall_back(kernel, error)
            return self.launch(original, kernel, args, kwargs)
        self.counters.add(served.counter)
        return result

    def _resolve(self, call: KernelCall) -> Served:
        """Serve the table's options and blocks to launches of this key from now on; nothing where the table has no row."""
        changes: dict[str, Any] | None = None
        try:
            changes = self._changes(call)
        except Exception as error:  # an argument of an unknown type must not end the user's program
            warn_once(f"{call.name.text}: a launch is not served: {first_line(error)}")
        deciding = {*OPTIONS, "grid", *(key for one in self.listed for key in one.keys)}
        return self.keys.remember(call, deciding, Served(changes or {}, self.slots[changes is None]))

    def _changes(self, call: KernelCall) -> dict[str, Any] | None:
        """Return the options and blocks of the table that differ from a launch's own; None if the table has no row for it.

        Each argument that a launch passes on costs the host 0.1 us.
        """
        own, given = split_options(call.kwargs)
        if (key := tuple(own.values())) not in self.described:
            tuners = [(plain_tuner(call.autotuner, own, one.keys), one) for one in self.listed]
            self.described[key] = [each for each in tuners if configs_digest(each[0].configs) == each[1].configs]
        for tuner, one in self.described[key]:
            launch = KernelCall(tuner, call.args, given)
            row = one.finder(launch.author_key(), launch.dtypes()).nearest(launch.sizes())
            if row is not None and self._fits(launch, row):
                chosen = decode_config(row.configs[0], type(tuner.configs[0])).all_kwargs()
                present = launch.named | launch_defaults() | {name: value for name, value in own.items() if value is not None}
                return {name: value for name, value in chosen.items() if present.get(name) != value}
        return None

    def _fits(self, call: KernelCall, row: ServingRow) -> bool:
        """Return whether the config of a row fits a launch: other blocks need the grid that was checked with them.

        Another place of the program may launch this kernel with a grid that does not read the blocks.
        """
        config, grid = row.configs[0], call.kwargs.get("grid")
        changed = changed_blocks({"kwargs": call.named}, config)
        if not changed or not callable(grid) or not set(changed) <= call.kwargs.keys():
            return not changed
        with suppress(Exception):  # of the program's own grid
            return list(call.grid(decode_config(config, type(call.autotuner.configs[0]))) or ()) == row.evidence.get("grid")
        return False


class Server:
    """Serve a table."""

    def __init__(
        self,
        root: Path,
        make_config: Any,
        miss: str = "author",
        manifest: str = "",
        missing: "Recorder | None" = None,
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
            preparing: preparation that begins when a table is read, and that the first launch of each key waits for.
            counters: counts of launches by kernel.
        """
        self.root, self.miss, self.manifest, self.missing = root, miss, manifest, missing
        self._is_strict = bool(manifest) or miss == "error"
        """The program asked for this table alone, so that a damaged table ends the program."""
        self._as_missed = f"its launches follow --miss {miss}, as if they were not tuned"
        self.counters = counters or Counters(None)
        self.counts = SimpleNamespace(hits=0, misses=0, tunings=0)
        """Keys with and without a row of the table, and runs of the author's tuning."""
        self._make_config, self._preparing, self._lock = make_config, preparing, RLock()
        self._table: ServingTable | None = None
        self._read_for = ""
        self._plain: dict[Any, PlainKernel | None] = {}

    def table(self) -> ServingTable | None:
        """Return the table of this GPU; None if no table may be served.

        Raises ValueError if the manifest names another table; under the policy `error` also if the table is damaged.
        """
        with self._lock:
            device = program.device_slug()
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
            warn_once(f"nothing is served: {error}")
            return None
        if table is None:
            devices = sorted(path.stem for path in (self.root / "served").glob("*.json") if path.stem != "manifest")
            others = f", only for {', '.join(devices)}" if devices else ""
            warn_once(f"nothing is served: {self.root} has no table for {device}{others}")
        digest = table.digest if table else "none"
        if self.manifest and not digest.startswith(self.manifest):
            raise ValueError(f"manifest: {self.manifest}: the table in {self.root} has SHA-256 {digest}")
        if table is not None:
            log.info("kerneltune: serving %d kernels of %s, SHA-256 %s", len(table.kernels), device, digest)
        return table

    def _kernels_of(self, function: Any, is_plain: bool = False) -> list[TableKernel]:
        """Return the table's kernels of a function's code; none where no table may be served, or for other code."""
        table, name = self.table(), KernelName(program.main_name(function.__module__), function.__qualname__)
        wanted = name.module, name.name, is_plain
        named = [one for one in table.kernels if (one.module, one.name, one.is_plain) == wanted] if table is not None else []
        same = [one for one in named if one.bytecode == kernels.bytecode_digest(function)]
        same = same or [one for one in named if one.source == arguments.source_digest(function)]  # another Python, or other code
        if named and not same:
            warn_once(f"{name.text}: its source has changed since it was tuned: {self._as_missed}")
        here = program.version_of(name.module)
        fitting = [one for one in same if not here or one.package in ("", here)]
        if same and not fitting:
            tuned = f"tuned with version {same[0].package} of its package, here is {here}"
            warn_once(f"{name.text}: {tuned}: {self._as_missed}")
        return fitting

    def make_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of Autotuner.run."""
        launch = self._launch

        def run(autotuner: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                state: ServingState = autotuner.kerneltune_state
            except AttributeError:
                state = self.attach(autotuner)
            if autotuner.configs is not state.shown:
                state = self._relisted(autotuner, state)
            return launch(state, original, autotuner, args, kwargs)

        return run

    def make_plain_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of `run` of kernels, for the kernels without an autotuner."""
        served = self._plain

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                plain = served[kernel.fn]
            except KeyError:
                plain = served[kernel.fn] = self._plain_kernel(kernel)
            return original(kernel, *args, **kwargs) if plain is None else plain.launch(original, kernel, args, kwargs)

        return run

    def _plain_kernel(self, kernel: Any) -> PlainKernel | None:
        """Return the server of a kernel without an autotuner; None if the table has no such kernel."""
        listed = self._kernels_of(kernel.fn, is_plain=True)
        return PlainKernel(listed, self.counters, self._slots(kernel)) if listed else None

    def _launch(self, state: ServingState, original: Callable[..., Any], tuner: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Launch an autotuner's kernel with the config of its key. The hot path of serving."""
        served = state.keys.find(args, kwargs)
        if served is None:
            found = self._resolve(original, KernelCall(tuner, args, kwargs), state)
            if not isinstance(found, Served):
                return found[0]
            served = found
        options = served.options
        kwargs.update(options)
        if served.hook is not None:
            served.hook({**dict(zip(tuner.arg_names, args, strict=False)), **kwargs})
        tuner.best_config = served.config
        try:
            result = tuner.fn.run(*args, **kwargs)
        except Exception as error:  # Triton's launch errors share no type
            rest = {name: value for name, value in kwargs.items() if name not in options}
            served.fall_back(tuner, error)
            return self._launch(state, original, tuner, args, rest)
        self.counters.add(served.counter)
        return result

    def attach(self, autotuner: Any) -> ServingState:
        """Find the table's kernel of an autotuner; torch.compile sees one config from here on, so that it times nothing."""
        with self._lock:
            state: ServingState | None = autotuner.__dict__.get(kernels.SERVING_STATE)
            if state is None:
                state = self._new_state(autotuner)
                if state.kernel is not None:
                    shown = self._live(state, state.kernel.portfolio[:1])
                    autotuner.configs = state.shown = shown or state.configs
                kernels.hold(autotuner, kernels.SERVING_STATE, state)
            return state

    def _slots(self, kernel: Any) -> tuple[int, ...]:
        return tuple(self.counters.slot(f"{kind} {kernel_name(kernel).text}") for kind in (SERVED, MISSED))

    def made(self, autotuner: Any) -> None:
        """Let an autotuner show its config before anything traces it."""
        with suppress(Exception):  # raised again where the program launches the kernel
            if self._kernels_of(autotuner.base_fn):
                self.attach(autotuner)

    def _relisted(self, autotuner: Any, first: ServingState) -> ServingState:
        """Return the state of an autotuner with the list of configs that the program has assigned to it."""
        with self._lock:
            return of_list(first.lists, autotuner.configs, lambda: self._new_state(autotuner, choices={}))

    def _new_state(self, autotuner: Any, choices: dict[Any, Any] | None = None) -> ServingState:
        """Return the state of an autotuner with its present list of configs.

        The state has the table's kernel of this list, else of another list; no kernel if the table cannot be read.
        """
        listed, same = autotuner.configs, list[TableKernel]()
        try:
            same = self._kernels_of(autotuner.base_fn)
        except Exception as error:  # a damaged table must not end the user's program
            if self._is_strict:
                raise
            warn_once(f"{kernel_name(autotuner).text}: not served: {first_line(error)}")
        same.sort(key=lambda one: one.configs != configs_digest(listed))
        kernel = same[0] if same else None
        split = {re.split(r"[.[]", name)[0] for group in (kernel.groups if kernel is not None else ()) for name in group.split}
        deciding, index = split.union(autotuner.keys), config_index(listed)
        return ServingState(kernel, listed, self._slots(autotuner), deciding, index, listed, choices=choices)

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

    def _resolve(self, original: Callable[..., Any], call: KernelCall, state: ServingState) -> "Served | tuple[Any]":
        """Return the config for launches of this key, or the result of the launch where the author's autotuner made it."""
        if self._preparing is not None:
            self._preparing.wait()
        row = state.row(call)
        if row is not None and (served := self._allowed(call, state, row)) is not None:
            self.counts.hits += 1
            return self._remember(call, state, served)
        if len(state.configs) == 1:  # nothing to choose
            return self._remember(call, state, _served(state.configs, state.counters[0]))
        with suppress(Exception):  # of the author's grid: the launch raises it again
            if 0 in (call.grid(state.configs[0]) or ()):  # without tokens, for example: any config does for this launch
                return _served(state.configs[:1], state.counters[0])
        self.counts.misses += 1
        if self.missing is not None:
            try:  # with the author's list rather than the shown config
                self.missing.record(call.twin(state.configs), call.args, call.kwargs)
            except Exception as error:  # a log that cannot be written is no reason to stop
                warn_once(f"misses are not recorded: {error}")
        policy = "nearest" if self.miss == "author" and program.is_capturing() else self.miss
        if policy == "error":
            raise LookupError(f"{call.name.text}: no config for {call.sizes()} {call.dtypes()} on {program.device_slug()}")
        if policy == "author":
            return self._by_author(original, call, state)
        return self._remember(call, state, _served(self._guess(policy, call, state), state.counters[1]))

    def _remember(self, call: KernelCall, state: ServingState, served: Served) -> Served:
        """Serve a config to launches of this key from now on.

        The author's pruning and the policy `nearest` may depend on every argument.
        """
        tuner = call.autotuner
        is_whole = tuner.early_config_prune or tuner.perf_model or self.miss == "nearest"
        deciding = state.deciding | kernels.all_but_floats(call) if is_whole else state.deciding
        return state.keys.remember(call, deciding, served)

    def _allowed(self, call: KernelCall, state: ServingState, row: ServingRow) -> Served | None:
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

    def _guess(self, policy: str, call: KernelCall, state: ServingState) -> list[Any]:
        """Return the configs of the nearest captured launch, or the author's, first config first."""
        nearest = state.kernel.nearest(call.sizes(), call.dtypes()) if policy == "nearest" and state.kernel is not None else None
        near = None if nearest is None else self._allowed(call, state, nearest)
        label = "" if near is None else label_of(near.config)
        used = f"the config of the nearest captured launch, {label}" if near else "the author's first config"
        warn_once(f"{call.name.text}: a launch that was not tuned: served with {used}")
        return [*([near.config, *near.fallbacks] if near else ()), *call.pruned(state.configs)]

    def _by_author(self, original: Callable[..., Any], call: KernelCall, state: ServingState) -> tuple[Any]:
        """Let the author's autotuner tune if necessary and launch, and remember its choice."""
        self.counters.add(state.counters[1])
        warn_once(f"{call.name.text}: a launch that was not tuned: the author's autotuner chooses")
        alone = call.twin(state.configs)
        if state.choices is not None:
            alone.cache = state.choices
        before = len(alone.cache)
        result = original(alone, *call.args, **call.kwargs)
        self.counts.tunings += len(alone.cache) > before
        for name in ("best_config", "configs_timings", "bench_time"):
            if name in alone.__dict__:
                setattr(call.autotuner, name, alone.__dict__[name])
        self._remember(call, state, _served([alone.best_config], state.counters[1]))
        return (result,)


def _served(configs: Sequence[Any], counter: int) -> Served:
    config, *fallbacks = configs
    return Served(config.all_kwargs(), counter, config, config.pre_hook, fallbacks)
