"""Fixtures of all tests: interpreter without a GPU, a seed per test, poisoned memory on a GPU, folders of their own."""

import functools
import gc
import os
import shutil
import signal
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits
from typer.main import get_command

if TYPE_CHECKING:
    from digested_code import Digest
    from fake_tuner import Setting

    from kerneltune.plan import Options

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
    # Small products on two threads take twice the processor time: each thread spins while it waits for the other.
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start; this process has imported torch and numpy
    torch.set_num_threads(1)
    threadpool_limits(1, "blas")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start background jobs; children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

_MEMORY = Path("/dev/shm")
_NEEDED = 4 << 30
"""Bytes that a file system in memory must have free: on a disk, tests wait 5 ms at every flush."""
if os.access(_MEMORY, os.W_OK) and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC and shutil.disk_usage(_MEMORY).free > _NEEDED:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

os.environ.setdefault("COLUMNS", "100")  # the console's width decides how tables break


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of cores plus 1, because tests spend a fifth of their time waiting for processes and timeouts."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "abuse" not in config.option.markexpr:  # also where -m says something else
        long = [item for item in items if item.get_closest_marker("abuse")]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection() -> None:
    """Collect no garbage while modules are imported: 9.3 -> 8.5 processor seconds of each worker, 2026-11-26."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude the objects of collection from garbage collections and from `gc.get_objects`, by which `adopt` finds autotuners.

    198 tests of tests/adopt, 2026-11-26: 105 -> 57 processor seconds. Later collections are rare: they took 45 of 930 processor
    seconds of the workers (sampled 2026-11-30), mostly full ones, which come often where few objects are old.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    gc.enable()


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """Every test draws its own numbers, the same in every run.

    Without a GPU, torch.manual_seed keeps three stacks of calls for the GPUs that may come: 1 ms of each test.
    """
    seed = torch.manual_seed if HAS_GPU else torch.default_generator.manual_seed
    seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Make a folder whose path is short enough for sockets; the path of `tmp_path` may be too long."""
    with tempfile.TemporaryDirectory(prefix="kt-") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def own_device() -> Iterator[None]:
    """Forget the GPU's name at the end of a test, because the test may have replaced it."""
    from kerneltune import device

    yield
    forget = getattr(device.current_slug, "cache_clear", None)
    if forget is not None:
        forget()


@pytest.fixture(autouse=HAS_GPU)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` holds NaN, so that a kernel that leaves a part of its output unwritten is caught."""
    from kerneltune.checking import check

    torch.utils.deterministic.fill_uninitialized_memory = True
    with check.poisoned_memory():
        yield


@pytest.fixture(scope="session", autouse=not HAS_GPU)
def masks_of_booleans() -> Iterator[None]:
    """Triton's interpreter takes masks of booleans only, as 3.9's does; 3.7.1's also takes integers."""
    from triton.runtime import interpreter

    def strict(name: str, position: int) -> Callable[..., object]:
        operation: Callable[..., object] = getattr(interpreter._interpreter, name)

        def checked(*args: Any) -> object:
            mask = np.asarray(args[position])
            if mask.dtype != bool:
                raise TypeError(f"{name}: mask of {mask.dtype}: see tl_lib.only_if")
            return operation(*args)

        return checked

    with pytest.MonkeyPatch.context() as patch:
        for name, position in {"load": 1, "store": 2, "atomic_rmw": 3}.items():
            patch.setattr(interpreter._interpreter, name, strict(name, position))
        yield


@pytest.fixture(scope="session", autouse=True)
def mended_interpreter() -> Iterator[None]:
    """Correct the interpreter wherever a test launches, as a check of a variant does."""
    from kerneltune.interpreter.modes import corrected

    with corrected():
        yield


@pytest.fixture(scope="session", autouse=True)
def made_commands() -> Iterator[None]:
    """Make the command line once for all tests that run a command in this process: it takes 40 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.testing._get_command", functools.cache(get_command))
        yield


@pytest.fixture(autouse=True)
def environment_of_the_test() -> Iterator[None]:
    """Undo what commands of the test set in the environment, such as the folder of configs."""
    from kerneltune import cache

    before = os.environ.get(cache.CONFIGS)
    with mock.patch.dict(os.environ):
        yield
        is_changed = os.environ.get(cache.CONFIGS) != before
    if is_changed:
        cache.clear()


@pytest.fixture
def forgotten_configs() -> Iterator[None]:
    """Forget the configs that were read, before the test and after it."""
    from kerneltune import cache

    cache.clear()
    yield
    cache.clear()


@pytest.fixture
def configs_dir(forgotten_configs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give this test an empty config cache of its own."""
    folder = tmp_path / "configs"
    folder.mkdir()
    monkeypatch.setenv("KERNELTUNE_CONFIGS", str(folder))
    return folder


@pytest.fixture
def setting(forgotten_configs: None, tmp_path: Path) -> "Setting":
    """Give this test the made-up operator with a trial store and a config cache of its own."""
    from fake_tuner import Setting

    return Setting(tmp_path)


@pytest.fixture
def options(tmp_path: Path) -> "Options":
    """Let commands write their results and configs into folders of this test."""
    from kerneltune import cache
    from kerneltune.plan import Options

    cache.use_root(tmp_path / "configs")
    return Options(results=tmp_path / "results")


@pytest.fixture
def digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Digest":
    """Give this test the digests of a package with changes, see `digested_code`."""
    from digested_code import digests_in

    monkeypatch.syspath_prepend(tmp_path)
    return digests_in(tmp_path)
