"""Storing configs: errors that keep the old file, and writes that lose nothing."""

import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_cache import GPU, OP, entry, stored_file

from kerneltune import cache

pytestmark = pytest.mark.usefixtures("forgotten_configs")


def test_store_of_several_entries_writes_one_entry_per_line_in_order(tmp_path: Path) -> None:
    for stored in (entry(16384), entry(8192), entry(8192, variant="atomic"), entry(16384, warps=8)):
        path = cache.store(GPU, stored, tmp_path)
    assert path == tmp_path / GPU / f"{OP}.json"
    assert path.read_text() == (
        '{\n  "schema": 1,\n  "op": "rmsnorm_fwd",\n  "device": "nvidia_h200",\n  "entries": [\n'
        '    {"variant": "atomic", "case": "8192x4096", "axes": {"M": 8192, "N": 4096}, "dtype": "bfloat16", "quant": "fp8", '
        '"options": {"zero_centered": false}, "policy": "cold", "config": {"block": 1024, "warps": 4}, '
        '"evidence": {"time_us": 43.5, "speedup": 1.2}},\n'
        '    {"variant": "optimized", "case": "8192x4096", "axes": {"M": 8192, "N": 4096}, "dtype": "bfloat16", "quant": "fp8", '
        '"options": {"zero_centered": false}, "policy": "cold", "config": {"block": 1024, "warps": 4}, '
        '"evidence": {"time_us": 43.5, "speedup": 1.2}},\n'
        '    {"variant": "optimized", "case": "16384x4096", "axes": {"M": 16384, "N": 4096}, "dtype": "bfloat16", '
        '"quant": "fp8", "options": {"zero_centered": false}, "policy": "cold", "config": {"block": 1024, "warps": 8}, '
        '"evidence": {"time_us": 43.5, "speedup": 1.2}}\n'
        "  ]\n}\n"
    )
    assert cache.load_strict(path) == cache.load(OP, GPU, tmp_path)
    assert sorted(p.name for p in path.parent.iterdir() if not p.name.startswith(".")) == [f"{OP}.json"]
    assert not list(path.parent.glob("*.tmp")) + list(path.parent.glob(".*.tmp"))


def test_store_into_a_folder_that_cannot_be_made_raises(tmp_path: Path) -> None:
    (tmp_path / GPU).write_text("")
    with pytest.raises(ValueError) as error:
        cache.store(GPU, entry(), tmp_path)
    assert str(error.value) == f"cannot write {tmp_path}/{GPU}/{OP}.json: File exists"
    assert [path.name for path in tmp_path.iterdir()] == [GPU]


def test_store_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored_file(tmp_path)
    before = path.read_text()

    def full(_source: object, _target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ValueError) as error:
        cache.store(GPU, entry(1), tmp_path)
    assert str(error.value) == f"cannot write {path}: No space left on device"
    assert path.read_text() == before
    assert not list(path.parent.glob(".*.tmp"))


@pytest.mark.parametrize(("ops", "named"), [((), r"\[\]"), (("a", "b"), r"\['a', 'b'\]")])
def test_store_of_no_entry_or_of_two_operators_raises_and_writes_nothing(tmp_path: Path, ops: Sequence[str], named: str) -> None:
    with pytest.raises(ValueError, match=rf"^entries: {named}: expected entries of one operator$"):
        cache.store(GPU, [replace(entry(), op=op) for op in ops], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": (("M", 8.5), ("N", 4))}, "axes: {'M': 8.5, 'N': 4}: expected int"),
        ({"axes": (("M", -8), ("N", 4))}, "axes: {'M': -8, 'N': 4}: expected int >= 0"),
        ({"dtype": ""}, "dtype: '': expected str of length >= 1"),
        ({"options": (("zero_centered", None),)}, "options: {'zero_centered': None}: expected bool | int | float | str"),
        ({"config": {"block": None}}, "config: {'block': None}: expected bool | int | float | str"),
        ({"config": {"block": 1 << 70}}, "config: {'block': 1180591620717411303424}: expected int <= 9223372036854775807"),
        ({"evidence": {"time_us": -1.0}}, "evidence.time_us: -1.0: expected float >= 0.0"),
    ],
)
def test_store_of_a_value_that_load_refuses_raises_and_keeps_the_file(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    before = cache.store(GPU, entry(), tmp_path).read_text()
    with pytest.raises(ValueError) as error:
        cache.store(GPU, entry(16384, **changes), tmp_path)
    assert str(error.value) == message
    assert (tmp_path / GPU / f"{OP}.json").read_text() == before


def test_store_of_an_infinite_knob_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^config: .*: expected values that JSON can hold, in the evidence too$"):
        cache.store(GPU, entry(config={"x": float("inf")}), tmp_path)


def _store_twenty(root: Path, first: int) -> None:
    for rows in range(first, first + 20):
        cache.store(GPU, entry(rows), root)


def test_store_from_two_processes_keeps_all_entries(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_store_twenty, args=(tmp_path, first)) for first in (1, 101)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    stored = [dict(e.case.axes)["M"] for e in cache.load_strict(tmp_path / GPU / f"{OP}.json")]
    assert stored == [*range(1, 21), *range(101, 121)]
