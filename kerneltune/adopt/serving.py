"""Launch kernels with the configs of the table, and time nothing.

A launch costs the host a key and a look-up. The key of an autotuned kernel holds the author's key, the element types, and the
sizes that decide between rows of the table. The key of a kernel without an autotuner holds every argument except floats and the
arguments that the capture ignored: a launch that the table lacks stays unchanged.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import RLock, Thread
from typing import TYPE_CHECKING, Any

from kerneltune.adopt import arguments, kernels, program
from kerneltune.adopt.bytecode import bytecode_digest, read_globals
from kerneltune.adopt.configs import StoredConfig, configs_digest, to_triton_configs
from kerneltune.adopt.counters import Counters
from kerneltune.adopt.kernels import KernelName, Launch, LaunchMap, get_or_make, kernel_name
from kerneltune.adopt.plain_serving import MISSED, SERVED, ServedChoices, ServedPlainKernel
from kerneltune.adopt.program import log, warn_once
from kerneltune.adopt.table import Group, ServingTable, TableKernel, read_table
from kerneltune.errors import first_line

if TYPE_CHECKING:
    from kerneltune.adopt.recorder import Recorder

_LONGEST_S = 20.0
"""Most seconds that a launch waits for the preparation of Triton."""


@dataclass(slots=True)
class ServedList:
    """Serve an autotuner with a list of configs.

    Attributes:
        configs: the list.
        kernel: the table's kernel; None where the table has none for this autotuner.
        is_tuned: whether the table's kernel was tuned with this list.
        served_slot, missed_slot: places of the counts of launches.
        key_names: arguments in the keys of launches: the arguments of the author's key, and the sizes that decide between rows.
        device: folder name of the GPU whose table is served.
        author_choices: the author's choices, if the program assigned the list: the autotuner's own cache tells no lists apart.
        by_launch: the configs by the keys of launches, which is all that a launch reads once its key was seen.
        by_author_key: the table's rows by author's key and element types, added by the first launch of each.
        by_row: the config objects of the table's rows, see `allowed`, by the identities of the rows' configs.
        shown: of the author's list, what `autotuner.configs` now holds: the list, or only the config for torch.compile.
        assigned: of the author's list, the lists that the program has assigned to the autotuner.
        on_others: the same list on GPUs of other models, whose tables differ, by the GPU's folder name.
    """

    configs: list[Any]
    kernel: TableKernel | None
    is_tuned: bool
    served_slot: int
    missed_slot: int
    key_names: set[str]
    device: str = field(default_factory=program.device_slug)
    author_choices: dict[Any, Any] | None = None
    by_launch: LaunchMap[ServedChoices] = field(default_factory=LaunchMap)
    by_author_key: LaunchMap[Group] = field(default_factory=LaunchMap)
    by_row: dict[int, ServedChoices] = field(default_factory=dict)
    shown: list[Any] | None = None
    assigned: dict[Any, "ServedList"] = field(default_factory=dict)
    on_others: dict[str, "ServedList"] = field(default_factory=dict)

    def row_choices(self, launch: Launch) -> ServedChoices | None:
        """Return the configs of the table's row of a launch; None where the table has no row, or no config may be launched."""
        if self.kernel is None:
            return None
        group = self.by_author_key.find(launch.args, launch.kwargs)
        if group is None:
            group = self.kernel.group(launch.author_key(), launch.dtypes())
            if group is None:
                return None
            self.by_author_key.remember(launch, launch.autotuner.keys, group)
        return self.allowed(launch, group.nearest({name: launch.size(name) for name in group.split}).configs)

    def allowed(self, launch: Launch, stored: tuple[StoredConfig, ...]) -> ServedChoices | None:
        """Return the configs of a row that a launch may run with; None for none.

        Launches share the configs of a row, so that each config fails once.
        """
        is_pruned = bool(launch.autotuner.early_config_prune)
        served = self.by_row.get(id(stored))
        if served is None:
            objects = self.objects_of(stored, is_pruned)
            last = self.configs[:1] if objects else ()  # the program's own, if a table of other hands lacks it
            served = self.by_row[id(stored)] = ServedChoices.of(list(dict.fromkeys([*objects, *last])), self.served_slot)
        if is_pruned:
            served = self._after_pruning(launch, served)
        return served if served.choices else None

    def _after_pruning(self, launch: Launch, row: ServedChoices) -> ServedChoices:
        """Return the configs of a row that the author's pruning, without the performance model, leaves for a launch.

        A config is found by its values, as a pruning may make new `Config`s.
        """
        configs = [choice.config for choice in row.choices]
        try:
            remaining = launch.pruned(list(dict.fromkeys([*self.configs, *configs])), by_model=False)
        except Exception:  # triton.autotune too prunes once for a key, and reuses the choice
            if row.last_allowed is None:
                launch.pruned(self.configs, by_model=False)  # raises the author's own error, if no served config is to blame
            return row.last_allowed or ServedChoices([], self.served_slot)
        allowed = []
        for values in (config.all_kwargs() for config in configs):
            allowed += [config for config in remaining if config.all_kwargs() == values][:1]
        served = ServedChoices.of(allowed, self.served_slot)
        if served.choices:
            row.last_allowed = served
        return served

    def objects_of(self, stored: Sequence[StoredConfig], is_pruned: bool = False) -> list[Any]:
        """Return stored configs as objects of triton.Config, without the configs that cannot be made here.

        If the autotuner's list was not tuned, such as a list that the program assigns for each size, configs with other values
        than each config of the list are left out, because the values may be wrong here.

        is_pruned: whether the author's pruning decides about the objects, and makes the objects that need a pre_hook.
        """
        without_hooks = [replace(config, pre_hook=False) for config in stored]
        listed = [config.kwargs for config in self.configs]
        object_of = to_triton_configs(self.configs, without_hooks if is_pruned else stored)
        objects = [object_of[config] for config in stored if config in object_of]
        return [config for config in objects if self.is_tuned or config.kwargs in listed]


class Server:
    """Serve a table."""

    def __init__(
        self,
        root: Path,
        miss: str = "author",
        manifest: str = "",
        missing: "Recorder | None" = None,
        preparing: Thread | None = None,
        counters: Counters | None = None,
    ) -> None:
        """Serve the table of a folder.

        Args:
            root: the tuned folder.
            miss: one of `startup.MISS_POLICIES`.
            manifest: SHA-256 that the table must have, or its beginning.
            missing: recorder of launches that the table does not have.
            preparing: thread of `ahead.prepare`, which starts when a table is read, and which new keys wait for.
            counters: counts of launches by kernel.
        """
        self.root, self.miss, self.manifest, self.missing = root, miss, manifest, missing
        self._is_strict = bool(manifest) or miss == "error"
        """The program asked for this table alone, so that a damaged table ends the program."""
        self._as_missed = f"its launches follow --miss {miss}, as if they were not tuned"
        self.counters = counters or Counters(None)
        self.hits = self.misses = self.tunings = 0
        """Keys with and without a row of the table, and runs of the author's tuning."""
        self._preparing, self._lock = preparing, RLock()
        self._tables: dict[str, ServingTable | None] = {}
        self._plain: dict[Any, ServedPlainKernel | None] = {}
        self._autotuned: set[Any] = set()
        """The functions of the autotuned kernels that were launched or shown."""

    def table(self) -> ServingTable | None:
        """Return the table of this GPU; None if no table may be served.

        Raises ValueError if the manifest names another table; under the policy `error` also if the table is damaged.
        """
        with self._lock:
            device = program.device_slug()
            if device and device not in self._tables:
                self._tables[device] = table = self._read(device)
                if table is not None and self._preparing is not None and self._preparing.ident is None:
                    self._preparing.start()
            return self._tables.get(device)

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
        """Return the table's kernels of a function's code; none where no table may be served, or for other code.

        A kernel of the program's file is `__main__` in one process, and has the name of its module in a process that imports it.
        """
        table, name = self.table(), KernelName.of(function)
        if table is None:
            return []
        named_alike = [kernel for kernel in table.kernels if (kernel.name, kernel.is_plain) == (name.name, is_plain)]
        of_module = [kernel for kernel in named_alike if kernel.module == name.module]
        others = [kernel for kernel in named_alike if kernel.module != name.module]
        candidates = of_module + [kernel for kernel in others if "__main__" in (kernel.module, name.module)]
        unchanged = [kernel for kernel in candidates if kernel.bytecode_digest == bytecode_digest(function)]
        if not unchanged and table.versions.get("python") != program.python_version():  # has other bytecode
            unchanged = [kernel for kernel in candidates if kernel.source_digest == arguments.source_digest(function)]
        values = read_globals(function) if unchanged else {}  # a global that is not bound yet may have any value
        unchanged = [kernel for kernel in unchanged if kernel.reads(values)]
        if of_module and not unchanged:
            warn_once(f"{name.text}: its source has changed since it was tuned: {self._as_missed}")
        version = program.version_of(name.module)
        fitting = [kernel for kernel in unchanged if not version or kernel.package in ("", version)]
        if unchanged and not fitting:
            versions = f"tuned with version {unchanged[0].package} of its package, here is {version}"
            warn_once(f"{name.text}: {versions}: {self._as_missed}")
        return fitting

    def _kernels_or_none(self, function: Any, is_plain: bool = False) -> list[TableKernel]:
        """Return the table's kernels of a function's code; an error, such as of a damaged table, must not end the program."""
        try:
            return self._kernels_of(function, is_plain)
        except Exception as error:
            if self._is_strict:
                raise
            warn_once(f"{KernelName.of(function).text}: not served: {first_line(error)}")
            return []

    def make_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of Autotuner.run."""
        serve = self._launch

        def run(autotuner: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                served_list: ServedList = getattr(autotuner, kernels.SERVED_ATTRIBUTE)
            except AttributeError:
                served_list = self.attach(autotuner)
            if autotuner.configs is not served_list.shown:
                served_list = self._assigned(autotuner, served_list)
            return serve(served_list, original, autotuner, args, kwargs)

        return run

    def make_plain_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of `run` of kernels, for the kernels without an autotuner."""
        served = self._plain

        def run(kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
            if kernel.fn not in served:
                tuned, new = partial(self._kernels_or_none, kernel.fn, is_plain=True), None
                if tuned() or program.has_several_models():
                    new = ServedPlainKernel(tuned, self.counters, *self._slots_of(kernel), self._autotuned)
                served.setdefault(kernel.fn, new)
            plain = served[kernel.fn]
            if plain is None or kwargs.get("warmup"):  # which compiles, and launches nothing
                return original(kernel, *args, **kwargs)
            return plain.launch(original, kernel, args, kwargs)

        return run

    def _launch(
        self, served_list: ServedList, original: Callable[..., Any], tuner: Any, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Launch an autotuner's kernel with the config of its key. The hot path of serving."""
        served = served_list.by_launch.find(args, kwargs)
        if served is None:
            launch = Launch(tuner, args, kwargs)
            served = self._resolve(launch, served_list)
            if served is None:
                return self._by_author(original, launch, served_list)
        choice = served.choices[0]
        config, options = choice.config, choice.options
        kwargs.update(options)
        try:
            if config.pre_hook is not None:
                config.pre_hook({**dict(zip(tuner.arg_names, args, strict=False)), **kwargs})
            tuner.best_config = config
            result = tuner.fn.run(*args, **kwargs)
            self.counters.add(served.slot)
            return result
        except Exception as error:  # of any type: a served config must not end the program
            falling_back = served.fall_back(tuner, choice, error, self.counters)
        with falling_back:  # outside the handler, so that an error of the program itself has no context
            rest = {name: value for name, value in kwargs.items() if name not in options}
            return self._launch(served_list, original, tuner, args, rest)

    def attach(self, autotuner: Any) -> ServedList:
        """Return the server of an author's list; torch.compile sees one config from here on, so that it times nothing."""
        with self._lock:
            author: ServedList | None = autotuner.__dict__.get(kernels.SERVED_ATTRIBUTE)
            if author is None:
                self._autotuned.add(autotuner.base_fn)
                author = self._list_of(autotuner)
                author.shown = author.configs
                if author.kernel is not None and author.is_tuned:  # the program may yet choose from a list that was not tuned
                    autotuner.configs = author.shown = author.objects_of(author.kernel.shared[:1]) or author.configs
                kernels.hold(autotuner, kernels.SERVED_ATTRIBUTE, author)
            return author

    def on_new_autotuner(self, autotuner: Any) -> None:
        """Let an autotuner show its config before anything traces it."""
        with suppress(Exception):  # raised again where the program launches the kernel
            if self._kernels_of(autotuner.base_fn):
                self.attach(autotuner)

    def _assigned(self, autotuner: Any, author: ServedList) -> ServedList:
        """Return the server of the list of configs that the program has assigned to an autotuner."""
        with self._lock:
            return get_or_make(author.assigned, autotuner.configs, lambda: replace(self._list_of(autotuner), author_choices={}))

    def _on_this_gpu(self, launch: Launch, served_list: ServedList) -> ServedList:
        """Return the server of the same list with the table of the present GPU."""
        if not program.has_several_models() or (device := program.device_slug()) == served_list.device:
            return served_list
        with self._lock:
            if device not in served_list.on_others:
                other, choices = self._list_of(launch.private_copy(served_list.configs)), served_list.author_choices
                served_list.on_others[device] = replace(other, by_launch=served_list.by_launch, author_choices=choices)
            return served_list.on_others[device]

    def _list_of(self, autotuner: Any) -> ServedList:
        """Return the server of an autotuner with its present list of configs.

        It has the table's kernel of this list, else of another list; no kernel if the table cannot be read, or if its kernels
        have other keys, because several autotuners may wrap a function.
        """
        configs, kernels_of_code = autotuner.configs, self._kernels_or_none(autotuner.base_fn)
        digest = configs_digest(configs)
        same_keys = [kernel for kernel in kernels_of_code if kernel.key_names == tuple(autotuner.keys)]
        kernel = min(same_keys, key=lambda kernel: kernel.configs_digest != digest, default=None)
        is_tuned = kernel is not None and kernel.configs_digest == digest
        deciding_sizes = {name for group in (kernel.groups if kernel is not None else ()) for name in group.split}
        arguments_of_sizes = {re.split(r"[.[]", size)[0] for size in deciding_sizes}  # `x` of `x.0` and of `x[1].0`
        return ServedList(configs, kernel, is_tuned, *self._slots_of(autotuner), arguments_of_sizes.union(autotuner.keys))

    def _slots_of(self, kernel: Any) -> tuple[int, int]:
        """Return the places of the counts of a kernel's launches: served, missed."""
        name = kernel_name(kernel).text
        return self.counters.slot(f"{SERVED} {name}"), self.counters.slot(f"{MISSED} {name}")

    def _resolve(self, launch: Launch, served_list: ServedList) -> ServedChoices | None:
        """Return the config for launches of this key; None where the author's autotuner is to choose it."""
        if self._preparing is not None and self._preparing.ident is not None:
            self._preparing.join(_LONGEST_S)  # a second preparation beside the thread would take longer
        if launch.conflict:  # the launch ends as without kerneltune, by the error of triton.autotune
            return None
        served_list = self._on_this_gpu(launch, served_list)
        tuned = served_list.row_choices(launch)
        if tuned is not None:
            self.hits += 1
            return self._remember(launch, served_list, tuned)
        if len(served_list.configs) == 1:  # nothing to choose
            return self._remember(launch, served_list, ServedChoices.of(served_list.configs, served_list.served_slot))
        with suppress(Exception):  # of the author's grid: the launch raises it again
            if 0 in (launch.grid(served_list.configs[0]) or ()):  # without tokens, for example: any config does for this launch
                return ServedChoices.of(served_list.configs[:1], served_list.served_slot)
        return self._missed(launch, served_list)

    def _missed(self, launch: Launch, served_list: ServedList) -> ServedChoices | None:
        """Return the config of a launch that was not tuned, by the miss policy; None under `author`."""
        self.misses += 1
        if self.missing is not None:
            try:  # with the author's list rather than the shown config
                self.missing.require_writable()
                self.missing.record(launch.private_copy(served_list.configs), launch.args, launch.kwargs)
            except Exception as error:  # a log that cannot be written is no reason to stop
                warn_once(f"misses are not recorded: {first_line(error)}")
                self.missing = None
        miss = "nearest" if self.miss == "author" and program.is_capturing() else self.miss
        if miss == "error":
            raise LookupError(f"{launch.name.text}: no config for {launch.sizes()} {launch.dtypes()} on {program.device_slug()}")
        if miss == "author":
            return None
        configs = self._untuned_configs(miss, launch, served_list)
        return self._remember(launch, served_list, ServedChoices.of(configs, served_list.missed_slot))

    def _remember(self, launch: Launch, served_list: ServedList, served: ServedChoices) -> ServedChoices:
        """Serve a config to launches of this key from now on.

        The author's pruning and the policy `nearest` may depend on every argument.
        """
        tuner = launch.autotuner
        depends_on_all = tuner.early_config_prune or tuner.perf_model or self.miss == "nearest"
        key_names = served_list.key_names | kernels.all_but_floats(launch) if depends_on_all else served_list.key_names
        return served_list.by_launch.remember(launch, key_names, served)

    def _untuned_configs(self, miss: str, launch: Launch, served_list: ServedList) -> list[Any]:
        """Return the author's configs, under `nearest` behind the configs of the nearest captured launch."""
        near: ServedChoices | None = None
        if miss == "nearest" and served_list.kernel is not None:
            row = served_list.kernel.nearest(launch.sizes(), launch.dtypes())
            near = served_list.allowed(launch, row.configs) if row is not None else None
        choices = near.choices if near is not None else []
        used = f"the config of the nearest captured launch, {choices[0].label}" if choices else "the author's first config"
        warn_once(f"{launch.name.text}: a launch that was not tuned: served with {used}")
        return [*(choice.config for choice in choices), *launch.pruned(served_list.configs)]

    def _by_author(self, original: Callable[..., Any], launch: Launch, served_list: ServedList) -> Any:
        """Let the author's autotuner tune if necessary and launch; remember its choice, and return the launch's result."""
        warn_once(f"{launch.name.text}: a launch that was not tuned: the author's autotuner chooses")
        alone = launch.private_copy(served_list.configs)
        if served_list.author_choices is not None:
            alone.cache = served_list.author_choices
        before = len(alone.cache)
        result = original(alone, *launch.args, **launch.kwargs)
        self.counters.add(served_list.missed_slot)
        self.tunings += len(alone.cache) > before
        for name in ("best_config", "configs_timings", "bench_time"):
            if name in alone.__dict__:
                setattr(launch.autotuner, name, alone.__dict__[name])
        self._remember(launch, served_list, ServedChoices.of([alone.best_config], served_list.missed_slot))
        return result
