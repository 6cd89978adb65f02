"""Describe a launch as a class: its metadata, the configs that it may run with, and where a replay finds its kernel."""

import hashlib
import json
import os
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from msgspec import structs

from kerneltune.adopt import arguments, configs, kernels, program
from kerneltune.adopt.arguments import NotRecordableError
from kerneltune.adopt.bytecode import bytecode_digest, read_globals
from kerneltune.adopt.configs import StoredConfig
from kerneltune.adopt.folder import Candidate, LaunchClass
from kerneltune.adopt.kernels import KernelName, Launch
from kerneltune.errors import first_line


def describe_launch(launch: Launch, ignored: Collection[str] = ()) -> tuple[LaunchClass, list[Any]]:
    """Return the class of a launch, yet without candidates, and for each storage of its tensors a live tensor.

    ignored: names of arguments whose values make no classes of their own.
    """
    tuner, name, function = launch.autotuner, launch.name, launch.autotuner.base_fn
    described, storages = arguments.describe(tuner.arg_names, launch.args, launch.keyword_arguments)
    source_digest, configs_digest = arguments.source_digest(function), configs.configs_digest(tuner.configs)
    global_values = read_globals(function)
    signature = arguments.signature(described, ignored, has_signs=launch.is_plain)
    parts = [name.module, name.name, source_digest, configs_digest, signature]
    if global_values:
        parts.append(json.dumps(global_values))
    if program.has_several_models():
        parts.append(program.device_slug())
    launch_class = LaunchClass(
        digest=hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16],
        kernel=name,
        file=function.__code__.co_filename,
        source_digest=source_digest,
        bytecode_digest=bytecode_digest(function),
        configs_digest=configs_digest,
        list_size=len(tuner.configs),
        device=program.device_slug(),
        versions=program.package_versions(name.module),
        key_names=tuple(tuner.keys),
        key_values=launch.author_key(),
        arguments=tuple(described),
        candidates=(),
        globals=global_values,
        is_plain=launch.is_plain,
    )
    return launch_class, storages


def with_candidates(launch_class: LaunchClass, launch: Launch, allowed: Sequence[Any]) -> LaunchClass:
    """Return the class of a launch with its candidates, and with the folders and names by which a replay finds the kernel.

    allowed: the configs that the author's pruning leaves.
    """
    function, home = launch.autotuner.base_fn, kernels.home_of(launch.autotuner)
    home_file = ""
    if home is not None:
        is_own_module = home.module == launch.name.module
        file = (function.__globals__ if is_own_module else vars(sys.modules[home.module])).get("__file__")
        home_file = os.path.abspath(file) if file else ""
    candidates = _candidates(launch, allowed)
    with suppress(Exception):  # last, because a grid may write its block into an argument (vLLM's causal_conv1d_fn)
        launch.grid(allowed[0])
    return structs.replace(
        launch_class,
        candidates=tuple(candidates),
        home=home,
        home_file=home_file,
        argv=_command(),
        path=program.import_folders(),
        problem=_why_not_replayable(function, launch_class.is_plain, home, home_file, candidates),
    )


def _command() -> tuple[str, ...]:
    """Return the arguments of the program, with the whole path of its file."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return (os.path.abspath(file), *sys.argv[1:]) if file else tuple(sys.argv)


def _candidates(launch: Launch, allowed: Sequence[Any]) -> list[Candidate]:
    """Return the candidates of a class: the author's configs and the configs of `space=`, or the configs of a plain kernel."""
    if launch.is_plain:
        return [candidate_of_launch(launch, config) for config in configs.plain_configs(launch)]
    space = getattr(launch.autotuner, "kerneltune_space", None)
    added = configs.of_space(launch.autotuner.configs, space) if space else ()
    return [candidate_of_launch(launch, config) for config in (*allowed, *added)]


def candidate_of_launch(launch: Launch, config: Any) -> Candidate:
    """Return a config as a candidate of a launch's class, with its grid."""
    stored = StoredConfig.of(config)
    try:
        return Candidate(stored, True, launch.grid(config))
    except NotRecordableError:
        raise
    except Exception as error:  # the author's own code: this candidate is out
        return Candidate(stored, True, None, problem=first_line(error))


def _why_not_replayable(
    function: Any, is_plain: bool, home: KernelName | None, home_file: str, candidates: Sequence[Candidate]
) -> str:
    """Return why a replay could not find a kernel, or could launch none of the author's configs; empty if it can."""
    if kernels.FACTORY in function.__qualname__:
        return "a function made the kernel, so that it cannot be imported by name"
    source = function.__code__.co_filename  # no file in an archive, or if relative and the program has changed the folder
    own_file = function.__globals__.get("__file__") or ""
    is_made = not os.path.isfile(source) and os.path.basename(source) != os.path.basename(own_file)
    if is_made and not os.path.isfile(home_file):  # a module with a file makes the kernel again where it is imported
        return "exec or a notebook cell defined the kernel, so that it cannot be launched again: move it to a module"
    if home is None:
        return f"no module holds {'the kernel' if is_plain else 'its autotuner'} by a name, so that it cannot be imported"
    if home.module == "__main__" and not os.path.isfile(home_file):
        return "the program is no file, so that the kernel cannot be loaded again"
    if any(candidate.grid is not None for candidate in candidates):
        return ""
    return f"no config can be launched: {candidates[0].problem or 'the launch has no grid'}"
