"""Mutated real files for every reader of data: no exception but a ValueError of one line, and no file is written or removed."""

import hashlib
import json
import os
import string
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from bench_jobs import CASE, OPS, VARIANT, Knobs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kerneltune import cache as configs
from kerneltune import exchange, misses, ops, records, sweep_file
from kerneltune.adopt import folder as capture
from kerneltune.adopt import table
from kerneltune.cli import settings as settings_file
from kerneltune.inspection import static
from kerneltune.search import trials
from kerneltune.task import Task
from kerneltune.workloads import model_config

REPO = Path(__file__).parents[2]
SHIPPED = REPO / "configs" / "nvidia_h200"
HOSTILE = (
    b"\x00", b"\xff\xfe", b"\x1b[31m", "\u202e".encode(), b"\\ud800", b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"9" * 5000,
    b"-1", b"0", b"true", b"null", b"[]", b"{}", b"[" * 3000, b'{"a":' * 3000, b'"', b"'", b"\n", b"\r", b"../../x", b"/etc/x",
    b"&a [*a]", b"!!python/object/apply:os.system [id]", b"<<: *a", b"__import__('os')", b"- ", b": ", b"# ", b"1" * 300, b"no",
)  # fmt: skip
"""Pieces that mutations insert: values that some reader, once, took for good or fell over."""


@cache
def operators() -> dict[str, object]:
    return dict(ops.load())


def _sweep(path: Path) -> None:
    sweep_file.load(path, operators())  # type: ignore[arg-type]


def _cache(path: Path) -> None:
    configs.load_strict(path)


def _class(path: Path) -> None:
    capture.read_class(path.parent)


def _counts(path: Path) -> None:
    _, problems = capture.read_notes([path])
    if problems:
        raise ValueError(problems[0])


def _table(path: Path) -> None:
    manifest = {"format": 1, "tables": {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}}
    (path.parent / table.MANIFEST).write_text(json.dumps(manifest))
    try:
        table.read_table(path.parent.parent, path.stem)
    finally:
        (path.parent / table.MANIFEST).unlink()


def _manifest(path: Path) -> None:
    served = path.parent / "nvidia_h200.json"
    served.write_text(SERVED)
    try:
        table.read_table(path.parent.parent, "nvidia_h200")
    finally:
        served.unlink()


def _model(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)  # takes seconds to import
        model_config.read(path)


def _settings(path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        settings_file.apply()


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
    if kind == "trials":
        return _journal()
    if kind in TEXTS:
        return TEXTS[kind].encode()
    op = operators()["rmsnorm_bwd"]
    entries = configs.load_strict(SHIPPED / "rmsnorm_bwd.json")[:3]
    writer = exchange.WRITERS["json" if kind == "table" else "python"]
    return next(iter(writer(op, "nvidia_h200", entries, {}).values())).encode()  # type: ignore[arg-type]


CONFIG = {"kwargs": {"BLOCK": 64}, "num_warps": 4, "num_stages": 3, "pre_hook": False}
SERVED = json.dumps(
    {
        "format": 1, "device": "nvidia_h200", "versions": {"triton": "3.7.1"}, "digest": "",
        "kernels": [
            {
                "module": "a.b", "name": "k", "source": "12", "bytecode": "34", "configs": "56", "package": "1.0", "keys": ["M"],
                "groups": [
                    {
                        "key": [8], "dtypes": ["bfloat16"], "split": ["x.0"],
                        "rows": [{"sizes": {"x.0": 8}, "configs": [CONFIG], "evidence": {"class": "0123456789abcdef"}}],
                    }
                ],
                "portfolio": [CONFIG],
            }
        ],
    }
)  # fmt: skip
"""A table of one kernel, as tuning a capture writes it."""
TEXTS = {
    "served": SERVED,
    "manifest": json.dumps({"format": 1, "tables": {"nvidia_h200.json": hashlib.sha256(SERVED.encode()).hexdigest()}}),
    "counts": '{"format": 1, "launches": {"0123456789abcdef": [3, 12.5], "f": [1, null]}, "refused": {"a.k": "why"}, "made": {}}',
    "settings": '[project]\nname = "x"\n[tool.kerneltune]\nplugins = ["a", "b.py"]\nresults = "r"\n',
    "misses": '{"op":"stream","variant":"optimized","device":"nvidia_h200","axes":{"read":8,"write":8},"dtype":"int32",'
    '"quant":"none","options":{"a":1},"policy":"cold"}\n' * 2,
    "model": json.dumps(
        {
            "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
            "n_shared_experts": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
            "v_head_dim": 128, "first_k_dense_replace": 3, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
        }
    ),
    "survey": json.dumps({"schema": 1, "triton": "3.7.1", "rows": []}),
    "class": json.dumps(
        {
            "format": 1, "digest": "0123456789abcdef", "kernel": {"module": "a.b", "name": "k"}, "file": "b.py", "source": "12",
            "bytecode": "34", "configs": "56", "list_size": 1, "device": "nvidia_h200", "versions": {"triton": "3.7.1"},
            "keys": ["M"], "key": [8],
            "arguments": [
                {
                    "name": "x", "kind": "tensor", "value": None, "block": [], "is_positional": True,
                    "tensor": {
                        "dtype": "bfloat16", "shape": [8, 4], "stride": [4, 1], "storage": 0, "offset": 0, "element_bytes": 2,
                        "is_whole": False,
                    },
                },
                {"name": "M", "kind": "value", "value": 8, "tensor": None, "block": [], "is_positional": True},
            ],
            "candidates": [{"config": CONFIG, "is_author": True, "grid": [1], "heuristics": {}, "problem": ""}],
            "storages": [{"kept": "missing"}], "reset": [], "restored": [], "in_graph": False, "choice": None, "problem": "",
        }
    ),
}  # fmt: skip
"""Small files of kinds that the repository has none of."""


def _journal() -> bytes:
    """Return a trial journal of two evaluations."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "f.log"
        store = trials.TrialStore(path, source_hash="abc")
        for n, evaluation in enumerate((trials.Evaluation("passed", 10.0), trials.Evaluation("failed", reason="why"))):
            store.put(Task(OPS[0], CASE, VARIANT), Knobs("run", n), evaluation)
        return path.read_bytes()


READERS: dict[str, tuple[str, Callable[[Path], object], int]] = {
    "sweep": ("f.yaml", _sweep, 100),
    "records": ("f.jsonl", records.load, 200),
    "cache": ("nvidia_h200/rmsnorm_bwd.json", _cache, 200),
    "table": ("f.json", _import, 160),
    "source": ("f.py", _import, 120),
    "trials": ("f.log", trials.history, 60),
    "model": ("f.json", _model, 120),
    "misses": ("f.jsonl", misses.read, 120),
    "survey": ("f.json", static.load, 120),
    "settings": ("pyproject.toml", _settings, 120),
    "class": ("0123456789abcdef/class.json", _class, 160),
    "counts": ("launches/f.json", _counts, 120),
    "served": ("served/nvidia_h200.json", _table, 160),
    "manifest": ("served/manifest.json", _manifest, 80),
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
    for what, start, length, piece in changes:
        begin = int(start * (len(data) + 1))
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
    stats = [(path, path.lstat()) for path in sorted(folder.rglob("*"))]
    return [(str(path), *((0, 0) if path.is_dir() else (status.st_size, status.st_mtime_ns))) for path, status in stats]


def read_mutations(kind: str, count: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read mutations of a file in a folder whose other files stay unchanged."""
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
        path.write_bytes(data)

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
            assert path.name in str(error)
            assert str(error)
            assert not set(str(error)) & set("\n\r\x1b\x00"), repr(str(error))
            str(error).encode()  # no lone surrogate
        assert listing(folder) == before

    read()


@pytest.mark.parametrize("kind", READERS)
def test_mutated_file_is_read_or_refused_with_one_line(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_mutations(kind, READERS[kind][2], tmp_path, monkeypatch)


@pytest.mark.abuse
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", READERS)
def test_thousands_of_mutated_files_are_read_or_refused_with_one_line(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_mutations(kind, 5000, tmp_path, monkeypatch)
