"""Serve kernels without an autotuner: options of a launch, and blocks where the grid is the grid that was tuned with them."""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

from kerneltune.adopt import kernels, program
from kerneltune.adopt.arguments import SCALAR_TYPES, is_tensor
from kerneltune.adopt.configs import (
    OPTIONS,
    StoredConfig,
    configs_digest,
    free_blocks,
    launch_defaults,
    plain_kernel,
    split_options,
)
from kerneltune.adopt.counters import Counters
from kerneltune.adopt.kernels import Launch, LaunchMap, all_but_floats, kernel_name
from kerneltune.adopt.program import warn_once
from kerneltune.adopt.table import ServingRow, TableKernel
from kerneltune.errors import first_line
from kerneltune.wording import assignments

SERVED, MISSED, FELL_BACK = "served", "missed", "fell back"
"""Kinds of launches: with a config of the table, of the miss policy, or in place of a config that failed. The name of their count
is `KIND KERNEL`."""
BY_AUTOTUNER = "by an autotuner"
"""Name of the count of launches that an autotuner's server counts."""


class OtherGridError(Exception):
    """Report that the grid of a launch is not the grid with which its blocks were tuned."""


_PURE_NAMES = frozenset(("triton", "tl", "cdiv", "math", "ceil"))
"""Names that a grid may read so that its values and the arguments decide about the result alone."""


class CheckedGrid(NamedTuple):
    """Hold the grids with which other blocks were tuned. Because a grid may read any value, each launch compares its grids.

    Attributes:
        blocks: the program's blocks by name.
        own: grid under the program's blocks.
        tuned: grid under the tuned blocks.
        held: values that the compared function holds, if they decide about its grids; else None.
    """

    blocks: dict[str, int]
    own: tuple[int, ...]
    tuned: tuple[int, ...]
    held: list[Any] | None

    @classmethod
    def of(cls, launch: Launch, row: ServingRow, blocks: dict[str, int]) -> "CheckedGrid | None":
        """Return the grids of a row; None if a launch has other grids. Tables of earlier versions lack the program's grid."""
        own = launch.grid(launch.autotuner.configs[0]) or ()
        tuned = launch.grid(row.configs[0].to_triton_config()) or ()
        if list(own) != row.evidence.get("program_grid", list(own)) or list(tuned) != row.evidence.get("grid"):
            return None
        return cls(blocks, own, tuned, _deciding_values(launch))

    def around(self, grid: Any) -> Any:
        """Return a program's grid, or a function that raises OtherGridError, before anything is launched, for another grid."""
        if self.held is not None and _held_values(grid) == self.held:
            return grid

        def checked(named: dict[str, Any]) -> Any:
            try:
                if tuple(grid({**named, **self.blocks})) == self.own:
                    sizes = grid(named)  # last, as a grid may write its arguments
                    if tuple(sizes) == self.tuned:
                        return sizes
            except Exception as error:  # the program's own code: its launch raises it again
                raise OtherGridError from error
            raise OtherGridError

        return checked


def _held_values(function: Any) -> list[Any]:
    """Return the values that a function encloses or has as defaults, None for a value that is not plain."""
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    if function.__defaults__ or function.__kwdefaults__:
        values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [value if type(value) in SCALAR_TYPES else None for value in values]


def _deciding_values(launch: Launch) -> list[Any] | None:
    """Return the values that a grid holds, if they and the integers of the launch's key decide about it; else None."""
    grid, named = launch.kwargs["grid"], launch.named
    if not inspect.isfunction(grid) or not _PURE_NAMES.issuperset(grid.__code__.co_names):
        return None
    texts = [value for value in grid.__code__.co_consts if isinstance(value, str | CodeType)]
    are_known = all(isinstance(text, str) and text in launch.autotuner.keys and type(named.get(text)) is int for text in texts)
    held = _held_values(grid)
    return held if are_known and None not in held else None


@dataclass(frozen=True, slots=True)
class LaunchChoice:
    """Hold a config and the keyword arguments of a launch with it.

    Attributes:
        config: the triton.Config; None for a kernel without an autotuner.
        options: the keyword arguments; without an autotuner only the arguments whose values differ from the program's.
        grid: the grids of other blocks; None for the program's blocks, or if the program gives the grid as numbers.
    """

    config: Any
    options: dict[str, Any]
    grid: CheckedGrid | None = None

    @property
    def label(self) -> str:
        """Return the values in a message."""
        if self.config is not None:
            return StoredConfig.of(self.config).label
        return assignments(self.options) or "the program's own arguments"


@dataclass(slots=True)
class ServedChoices:
    """Hold the choices of the launches of a key.

    Attributes:
        choices: the choice that launches take, then the choices that replace it, in their order, if it fails to launch.
        slot: place of the count of these launches.
        last_allowed: of a row of the table, the choices that the author's pruning left for the row's last launch.
    """

    choices: list[LaunchChoice]
    slot: int
    last_allowed: "ServedChoices | None" = None

    @classmethod
    def of(cls, configs: Sequence[Any], slot: int) -> "ServedChoices":
        """Serve the first config, and fall back to the next configs in their order."""
        return cls([LaunchChoice(config, config.all_kwargs()) for config in configs], slot)

    def fall_back(self, kernel: Any, failed: LaunchChoice, error: Exception, counters: Counters) -> AbstractContextManager[None]:
        """Replace a choice that fails to launch by the next, unless another thread has done so.

        Within the returned context the launch is tried again. If it fails there, the launch is to blame, and the choice stays.
        The error is raised if no other choice is left.
        """
        if not program.drop_failed(self.choices, failed, error):
            return nullcontext()
        return self._falling_back(kernel_name(kernel).text, failed, first_line(error), counters)

    @contextmanager
    def _falling_back(self, name: str, failed: LaunchChoice, reason: str, counters: Counters) -> Iterator[None]:
        slot = self.slot
        if slot == counters.slot(f"{SERVED} {name}"):  # a launch that was not tuned stays one
            self.slot = counters.slot(f"{FELL_BACK} {name}")
        try:
            yield
        except BaseException:
            self.slot = slot
            self.choices.insert(0, failed)
            raise
        warn_once(f"{name}: config {failed.label} fails here ({reason}): falling back to {self.choices[0].label}")


@dataclass(slots=True)
class ServedPlainKernel:
    """Serve a kernel without an autotuner.

    Attributes:
        find_kernels: function that returns the present GPU's kernels in the table of this code, each with other options of the
            program.
        counters: counts of the process.
        served_slot, missed_slot: places of the counts of launches.
        autotuned: the functions that autotuners launch, too.
        by_launch: the served changes by the keys of launches.
        kernels_of: the results of `find_kernels` by the GPU's folder name.
        by_options: by the GPU and the options of the program, the autotuners that describe the kernel, with the table's kernels.
    """

    find_kernels: Callable[[], list[TableKernel]]
    counters: Counters
    served_slot: int
    missed_slot: int
    autotuned: Collection[Any]
    by_launch: LaunchMap[ServedChoices] = field(default_factory=lambda: LaunchMap(has_signs=True))
    kernels_of: dict[str, list[TableKernel]] = field(default_factory=dict)
    by_options: dict[tuple[Any, ...], list[tuple[Any, TableKernel]]] = field(default_factory=dict)

    def launch(self, original: Callable[..., Any], kernel: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Launch the kernel with the changes of the launch's key. The hot path of serving."""
        served = self.by_launch.find(args, kwargs) or self._resolve(Launch(kernel, args, kwargs))
        choice = served.choices[0]
        try:
            if choice.grid is None:
                result = original(kernel, *args, **{**kwargs, **choice.options})
            else:
                grid = choice.grid.around(kwargs["grid"])
                result = original(kernel, *args, **{**kwargs, **choice.options, "grid": grid})
            self.counters.add(served.slot)
            return result
        except OtherGridError:
            falling_back = None
        except Exception as error:  # of any type: a served config must not end the program
            falling_back = served.fall_back(kernel, choice, error, self.counters)
        if falling_back is not None:  # outside the handlers, so that an error of the program itself has no context
            with falling_back:
                return self.launch(original, kernel, args, kwargs)
        result = original(kernel, *args, **kwargs)
        self.counters.add(self.missed_slot)
        return result

    def _resolve(self, launch: Launch) -> ServedChoices:
        """Serve the table's options and blocks to launches of this key from now on; nothing where the table has no row."""
        choice: LaunchChoice | None = None
        is_by_autotuner = launch.autotuner.fn in self.autotuned and kernels.is_by_autotuner(launch.kwargs)
        try:
            choice = None if is_by_autotuner else self._choice(launch)
        except Exception as error:  # an argument of an unknown type must not end the user's program
            warn_once(f"{launch.name.text}: a launch is not served: {first_line(error)}")
        tuned_keys = {name for tuned in self.kernels_of.values() for kernel in tuned for name in kernel.key_names}
        key_names = {*OPTIONS, "grid", *tuned_keys.intersection(all_but_floats(launch))}
        choices = [LaunchChoice(None, {})]
        if choice is not None and choice.options:
            choices.insert(0, choice)
        has_elements = any(0 not in getattr(value, "shape", ()) for value in launch.values if is_tensor(value))
        is_missed = choice is None and has_elements  # without elements nothing can be tuned
        slot = self.missed_slot if is_missed else self.served_slot
        if is_by_autotuner:
            slot = self.counters.slot(BY_AUTOTUNER)
        return self.by_launch.remember(launch, key_names, ServedChoices(choices, slot))

    def _choice(self, launch: Launch) -> LaunchChoice | None:
        """Return the options and blocks of the table that differ from a launch's own; None if the table has no row for it.

        Each argument that a launch passes on costs the host 0.1 us.
        """
        options, others = split_options(launch.autotuner, launch.kwargs)
        device = program.device_slug()
        values = (device, *options.values())
        if device not in self.kernels_of:
            self.kernels_of[device] = self.find_kernels()
        if values not in self.by_options:
            tuners = [(plain_kernel(launch.autotuner, options, kernel.key_names), kernel) for kernel in self.kernels_of[device]]
            self.by_options[values] = [each for each in tuners if configs_digest(each[0].configs) == each[1].configs_digest]
        given_options = {name: value for name, value in options.items() if value is not None}
        for tuner, kernel in self.by_options[values]:
            described = Launch(tuner, launch.args, others)
            group = kernel.group(described.author_key(), described.dtypes())
            if group is not None and (choice := _row_choice(described, group.nearest(described.sizes()), given_options)):
                return choice
        return None


def _row_choice(launch: Launch, row: ServingRow, given_options: dict[str, Any]) -> LaunchChoice | None:
    """Return the config of a row as a choice; None if it changes a block of the launch that may not change.

    given_options: the options that the program gives.
    """
    config, grid = row.configs[0], None
    if changed := config.changed(launch.named):
        blocks = {name: size for name, size in free_blocks(launch).items() if name in changed}
        if blocks.keys() != changed:
            return None
        if callable(launch.kwargs.get("grid")) and (grid := CheckedGrid.of(launch, row, blocks)) is None:
            return None
    present = launch.named | launch_defaults() | given_options
    chosen = config.to_triton_config().all_kwargs()
    return LaunchChoice(None, {name: value for name, value in chosen.items() if present.get(name) != value}, grid)
