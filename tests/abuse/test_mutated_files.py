"""Mutated real files for every reader of data: no exception but a ValueError of one line, and no file is written or removed."""

import gzip
import json
import os
import string
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kerneltune import cache as configs
from kerneltune import exchange, ops, records, rule, sweep
from kerneltune.search import spaces

REPO = Path(__file__).parents[2]
SHIPPED = REPO / "configs" / "nvidia_h200"
HOSTILE = (
    b"\x00", b"\xff\xfe", b"\x1b[31m", "\u202e".encode(), b"\\ud800", b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"9" * 5000,
    b"-1", b"0", b"true", b"null", b"[]", b"{}", b"[" * 3000, b'{"a":' * 3000, b'"', b"'", b"\n", b"\r", b"../../x", b"/etc/x",
    b"&a [*a]", b"!!python/object/apply:os.system [id]", b"<<: *a", b"__import__('os')", b"- ", b": ", b"# ", b"1" * 300, b"no",
)  # fmt: skip
"""What mutations put in: values that some reader, once, took for good or fell over."""


@cache
def operators() -> dict[str, object]:
    return dict(ops.load())


def _sweep(path: Path) -> None:
    sweep.load(path, operators())  # type: ignore[arg-type]


def _cache(path: Path) -> None:
    configs.load_strict(path)


def _import(path: Path) -> None:
    exchange.read(path, operators()["rmsnorm_bwd"])  # type: ignore[arg-type]


@cache
def seed(kind: str) -> bytes:
    """Return a real file, small enough that many mutations of it are read in a second."""
    if kind == "sweep":
        return b"".join((REPO / "sweeps" / "rmsnorm.yaml").read_bytes().splitlines(keepends=True)[:60])
    if kind == "records":
        lines = (REPO / "results" / "nvidia_h200" / "fp8_groups.jsonl").read_bytes().splitlines(keepends=True)
        return b"".join(lines[:6])
    if kind == "cache":
        file = json.loads((SHIPPED / "rmsnorm_bwd.json").read_bytes())
        return json.dumps({**file, "entries": file["entries"][:6]}).encode()
    if kind == "rules":
        return (SHIPPED / "rules" / "fp16_gemm.json").read_bytes()
    if kind == "space":
        (path, *_) = sorted((REPO / "results" / "nvidia_h200" / "spaces").glob("*.csv.gz"), key=os.path.getsize)
        return b"".join(gzip.decompress(path.read_bytes()).splitlines(keepends=True)[:40])
    op = operators()["rmsnorm_bwd"]
    entries = configs.load_strict(SHIPPED / "rmsnorm_bwd.json")[:3]
    writer = exchange.WRITERS["json" if kind == "table" else "python"]
    return next(iter(writer(op, "nvidia_h200", entries, {}).values())).encode()  # type: ignore[arg-type]


READERS: dict[str, tuple[str, Callable[[Path], object], int]] = {
    "sweep": ("f.yaml", _sweep, 250),
    "records": ("f.jsonl", records.load, 500),
    "cache": ("nvidia_h200/rmsnorm_bwd.json", _cache, 500),
    "rules": ("nvidia_h200/rules/fp16_gemm.json", rule.load_strict, 300),
    "space": ("f.csv.gz", spaces.read, 500),
    "table": ("f.json", _import, 400),
    "source": ("f.py", _import, 300),
}
"""Kind of file: its name, its reader, and how many mutations are tried in every run."""

Change = tuple[str, float, float, bytes]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(("put", "replace", "cut", "token", "repeat", "end")),
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(HOSTILE) | st.binary(max_size=6),
    ),
    min_size=1,
    max_size=4,
)
_WORD = frozenset((string.ascii_letters + string.digits + "._-+").encode())


def mutated(data: bytes, changes: list[Change]) -> bytes:
    """Return the data with changes: at a place, over some length or a word, with a piece of bytes."""
    for what, place, length, piece in changes:
        begin = int(place * (len(data) + 1))
        end = min(len(data), begin + 1 + int(length * 40))
        if what == "token":
            end = begin
            while end < len(data) and data[end] in _WORD:
                end += 1
            while begin and data[begin - 1] in _WORD:
                begin -= 1
        new = {"cut": b"", "repeat": data[begin:end] * 3, "end": b""}.get(what, piece)
        data = data[:begin] + new + (b"" if what == "end" else data[begin if what == "put" else end :])
    return data


def listing(folder: Path) -> list[tuple[str, int, int]]:
    found = [(path, path.lstat()) for path in sorted(folder.rglob("*"))]
    return [(str(path), status.st_size, status.st_mtime_ns) for path, status in found]


def read_mutations(kind: str, count: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read mutations of a file in a folder beside others, which stay as they are."""
    name, reader, _ = READERS[kind]
    inside, outside = folder / "a" / "b", folder / "outside"
    inside.mkdir(parents=True)
    outside.mkdir()
    (outside / "kept").write_text("kept")
    monkeypatch.chdir(inside)
    path = inside / name
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = seed(kind)

    def save(data: bytes) -> None:
        path.write_bytes(gzip.compress(data, 1) if kind == "space" else data)

    save(begun)
    reader(path)  # as it is it is good

    @settings(max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(CHANGES)
    def read(changes: list[Change]) -> None:
        save(mutated(begun, changes))
        before = listing(folder)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader(path)
        except ValueError as error:
            assert type(error) is ValueError
            assert str(error)
            assert not set(str(error)) & set("\n\r\x1b\x00"), repr(str(error))
            str(error).encode()  # no lone surrogate
        assert listing(folder) == before

    read()


@pytest.mark.parametrize("kind", READERS)
def test_a_mutated_file_is_read_or_refused_by_one_line(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_mutations(kind, READERS[kind][2], tmp_path, monkeypatch)


@pytest.mark.abuse
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", READERS)
def test_thousands_of_mutated_files_are_read_or_refused_by_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_mutations(kind, 5000, tmp_path, monkeypatch)
