"""Fixtures of all tests: interpreter without a GPU, a seed per test, poisoned memory on a GPU, folders of their own."""

import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from made_up import Setting

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

os.environ.setdefault("COLUMNS", "100")  # the console's width decides how tables break


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> None:
    """Every test draws its own numbers, the same in every run."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=HAS_GPU)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` holds NaN, so that a kernel that leaves a part of its output unwritten is caught."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def configs_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty config cache of this test's own."""
    from kerneltune import cache

    folder = tmp_path / "configs"
    folder.mkdir()
    monkeypatch.setenv("KERNELTUNE_CONFIGS", str(folder))
    cache.clear()
    yield folder
    cache.clear()


@pytest.fixture
def setting(tmp_path: Path) -> Iterator["Setting"]:
    """The made-up operator with a trial store and a config cache of this test's own."""
    from made_up import Setting

    from kerneltune import cache

    cache.clear()
    yield Setting(tmp_path)
    cache.clear()
