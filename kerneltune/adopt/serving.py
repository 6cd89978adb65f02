"""Serving: `Autotuner.run` launches the config of the table, and never times anything.

What a launch costs here is a tuple of its arguments' metadata and one look-up.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from kerneltune.adopt import program
from kerneltune.adopt.arguments import launch_key
from kerneltune.adopt.kernels import (
    Call,
    bytecode_digest,
    config_label,
    configs_digest,
    encode_config,
    kernel_name,
    live_config,
    source_digest,
)
from kerneltune.adopt.table import ServingRow, ServingTable, TableKernel, read_table

if TYPE_CHECKING:
    from kerneltune.adopt.ahead import Preparation
    from kerneltune.adopt.recorder import Recorder

log = logging.getLogger("kerneltune.adopt")

_MOST_REMEMBERED, _MOST_LISTS = 4096, 64


@dataclass(slots=True)
class Served:
    """What launches of one kind run with.

    Attributes:
        config: the live config object.
        options: its values as keyword arguments.
        hook: its pre_hook.
        others: configs that a launch falls back to.
    """

    config: Any
    options: dict[str, Any]
    hook: Callable[[dict[str, Any]], Any] | None
    others: list[Any]


@dataclass(slots=True)
class ServingState:
    """What is known of one autotuner.

    Attributes:
        kernel: of the table; None where the table has none for it.
        configs: the author's list.
        shown: the list that the autotuner shows: the author's, or its portfolio. Another one was assigned by the program.
        memo: launch key -> what is served.
        lists: the same for lists that the program assigned later, by the configs and by their identities.
        choices: of the author's autotuner from such a list; its own cache has one choice for a key, whatever the list.
    """

    kernel: TableKernel | None
    configs: list[Any]
    shown: list[Any]
    memo: dict[tuple[Any, ...], Served] = field(default_factory=dict)
    lists: "dict[tuple[Any, ...], ServingState]" = field(default_factory=dict)
    choices: dict[Any, Any] | None = None


@dataclass(slots=True)
class Counts:
    """What serving has done in this process: kinds of launches by what became of them, and author's tunings."""

    hits: int = 0
    misses: int = 0
    tunings: int = 0


class Server:
    """Serves one table."""

    def __init__(
        self,
        root: Path,
        make_config: Any,
        miss: str = "author",
        manifest: str = "",
        missing: "Recorder | None" = None,
        portfolio: int = 1,
        preparing: "Preparation | None" = None,
    ) -> None:
        """make_config: the class triton.Config; manifest: SHA-256 that the table must have; portfolio: configs for torch.compile.

        miss: one of `startup.POLICIES`; missing: records launches that the table does not have; preparing: begun when a table is
        read, waited for at the first launch of each kind.
        """
        self.root, self.miss, self.manifest, self.missing, self.portfolio = root, miss, manifest, missing, portfolio
        self.counts, self._preparing = Counts(), preparing
        self._make_config = make_config
        self._lock = RLock()
        self._table: ServingTable | None = None
        self._by_name: dict[tuple[str, str], list[TableKernel]] = {}
        self._read_for = ""
        self._said: set[str] = set()

    def _say(self, text: str) -> None:
        """Warn once of each thing."""
        if text not in self._said:
            self._said.add(text)
            log.warning("kerneltune: %s", text)

    def table(self, is_early: bool = False) -> ServingTable | None:
        """Return the table of this GPU, None where there is none that may be served.

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
            self._say(f"nothing is served: {error}")
            return None
        if table is None:
            found = sorted(path.stem for path in (self.root / "served").glob("*.json") if path.stem != "manifest")
            self._say(f"nothing is served: {self.root} has no table for {device}, only for {', '.join(found) or 'no GPU'}")
        digest = table.digest if table else "none"
        if self.manifest and not digest.startswith(self.manifest):
            raise ValueError(f"manifest: {self.manifest}: the table in {self.root} has SHA-256 {digest}")
        if table is not None:
            log.info("kerneltune: serving %d kernels of %s, SHA-256 %s", len(table.kernels), device, digest)
        return table

    def make_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of Autotuner.run."""

        def run(autotuner: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                state: ServingState = autotuner.kerneltune_state
            except AttributeError:
                state = self.attach(autotuner)
            if autotuner.configs is not state.shown:
                state = self._relisted(autotuner, state)
            served = state.memo.get(key := launch_key(args, kwargs))
            if served is None:
                found = self._resolve(original, Call(autotuner, args, kwargs), state, key)
                if not isinstance(found, Served):
                    return found[0]
                served = found
            while True:
                if served.hook is not None:
                    served.hook({**dict(zip(autotuner.arg_names, args, strict=False)), **kwargs, **served.options})
                autotuner.best_config = served.config
                try:
                    return autotuner.fn.run(*args, **kwargs, **served.options)
                except Exception as error:
                    if not served.others or not program.is_launch_failure(error):
                        raise
                    self._fall_back(autotuner, served, error)

        return run

    def attach(self, autotuner: Any, is_early: bool = False) -> ServingState:
        """Find the table's kernel of an autotuner; torch.compile sees the portfolio from here on."""
        with self._lock:
            state: ServingState | None = autotuner.__dict__.get("kerneltune_state")
            if state is None:
                kernel = self._kernel_of(autotuner, is_early)
                state = ServingState(kernel, autotuner.configs, autotuner.configs)
                if kernel is not None and kernel.portfolio and self.portfolio:
                    state.shown = self._live(state, kernel.portfolio[: self.portfolio]) or autotuner.configs
                    autotuner.configs = state.shown
                autotuner.kerneltune_state = state
            return state

    def _relisted(self, autotuner: Any, first: ServingState) -> ServingState:
        """Return what is known of an autotuner with the list of configs that the program has assigned to it."""
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
                state = ServingState(self._kernel_of(autotuner, False), configs, configs, choices={})
                first.lists[equal] = first.lists[key] = state
            return state

    def made(self, autotuner: Any) -> None:
        """Give an autotuner its portfolio before anything traces it."""
        name = kernel_name(autotuner)
        with suppress(ValueError):  # raised again where the program launches the kernel
            if self.table(is_early=True) is not None and _table_name(name.module, name.name) in self._by_name:
                self.attach(autotuner, is_early=True)

    def _kernel_of(self, autotuner: Any, is_early: bool) -> TableKernel | None:
        if self.table(is_early) is None:
            return None
        name = kernel_name(autotuner)
        found = self._by_name.get(_table_name(name.module, name.name), [])
        same = [kernel for kernel in found if kernel.bytecode == bytecode_digest(autotuner.base_fn)]
        if found and not same:  # another Python, or other code
            same = [kernel for kernel in found if kernel.source == source_digest(autotuner.base_fn)]
        if not same:
            if found:
                self._say(f"{name.text}: its source has changed since it was tuned: policy {self.miss}")
            return None
        package = program.version_of(name.module)
        kernel = next((one for one in same if one.configs == configs_digest(autotuner.configs)), same[0])
        if kernel.package and package and kernel.package != package:
            self._say(f"{name.text}: tuned with version {kernel.package} of its package, here is {package}: policy {self.miss}")
            return None
        return kernel

    def _live(self, state: ServingState, stored: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the live config objects of stored ones, without those that cannot be made here.

        Of a list that was not tuned, as programs assign one for each size, a value that no config of it has may be wrong here.
        """
        found = [live_config(state.configs, config, self._make_config) for config in stored]
        is_tuned = state.kernel is not None and state.kernel.configs == configs_digest(state.configs)
        return [config for config in found if config is not None and (is_tuned or _has_values_of(config, state.configs))]

    def _resolve(
        self, original: Callable[..., Any], call: Call, state: ServingState, key: tuple[Any, ...]
    ) -> "Served | tuple[Any]":
        """Return what launches of this key run with, or the result of the launch where the author's autotuner made it."""
        if self._preparing is not None:
            self._preparing.wait()
        sizes, dtypes = call.outline()
        row = None if state.kernel is None else state.kernel.row(call.author_key(), sizes, dtypes)
        if configs := self._allowed(call, state, row):
            self.counts.hits += 1
            return self._remember(state, key, configs)
        if _launches_nothing(call, state.configs[0]):
            return self._remember(state, key, state.configs[:1])
        self.counts.misses += 1
        self._record_miss(call, state)
        policy = "nearest" if self.miss == "author" and program.is_capturing() else self.miss
        if policy == "error":
            raise LookupError(f"{call.name.text}: no config for {sizes} {dtypes} on {program.device_slug()}")
        if policy == "author":
            return self._by_author(original, call, state, key)
        return self._remember(state, key, self._guess(policy, call, state))

    def _allowed(self, call: Call, state: ServingState, row: ServingRow | None) -> list[Any]:
        """Return the configs of a row that the author's pruning allows for a launch, whatever a performance model says."""
        configs = [] if row is None else self._live(state, row.configs)
        if not call.autotuner.early_config_prune or not configs:
            return configs
        left = call.pruned(list(dict.fromkeys([*state.configs, *configs])), by_model=False)
        return [config for config in configs if config in left]

    def _guess(self, policy: str, call: Call, state: ServingState) -> list[Any]:
        """Return the configs of the nearest captured launch, or the author's, first config first."""
        by_author = call.pruned(state.configs)
        nearest = state.kernel.nearest(*call.outline()) if policy == "nearest" and state.kernel is not None else None
        near = self._allowed(call, state, nearest)
        used = (
            f"the config of the nearest captured launch, {config_label(encode_config(near[0]))}" if near else "the author's first"
        )
        self._say(f"{call.name.text}: a launch that was not tuned: served with {used}")
        return [*near, *by_author]

    def _by_author(self, original: Callable[..., Any], call: Call, state: ServingState, key: tuple[Any, ...]) -> tuple[Any]:
        """Have the author's autotuner launch, tuning if it must, and remember its choice."""
        if len(state.configs) > 1:
            self._say(f"{call.name.text}: a launch that was not tuned: the author's autotuner chooses")
        alone = call.twin(state.configs)
        if state.choices is not None:
            alone.cache = state.choices
        before = len(alone.cache)
        result = original(alone, *call.args, **call.kwargs)
        self.counts.tunings += len(alone.cache) > before
        for name in ("best_config", "configs_timings", "bench_time"):
            if name in alone.__dict__:
                setattr(call.autotuner, name, alone.__dict__[name])
        self._remember(state, key, [alone.best_config])
        return (result,)

    def _remember(self, state: ServingState, key: tuple[Any, ...], configs: Sequence[Any]) -> Served:
        config, *others = configs
        if len(state.memo) >= _MOST_REMEMBERED:
            state.memo.clear()
        served = state.memo[key] = Served(config, config.all_kwargs(), config.pre_hook, others)
        return served

    def _record_miss(self, call: Call, state: ServingState) -> None:
        """Record a launch that was not tuned, with the author's list rather than the portfolio."""
        if self.missing is not None:
            try:
                self.missing.record(call.twin(state.configs), call.args, call.kwargs)
            except Exception as error:  # a log that cannot be written is no reason to stop
                self._say(f"misses are not recorded: {error}")

    def _fall_back(self, autotuner: Any, served: Served, error: Exception) -> None:
        """Serve the next config from now on, where the present one fails to launch."""
        failed, config = served.config, served.others.pop(0)
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        bad, good = (config_label(encode_config(one)) for one in (failed, config))
        self._say(f"{kernel_name(autotuner).text}: config {bad} fails here ({said}): falling back to {good}")
        served.config, served.options, served.hook = config, config.all_kwargs(), config.pre_hook


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
