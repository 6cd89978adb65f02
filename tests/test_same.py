"""What configs launch, then and now: digests of a child process, the reasons made of them, and `cache verify --static`."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kerneltune import cache, ops
from kerneltune.cache import Entry
from kerneltune.cli import app
from kerneltune.inspection import launches, same

ENTRY = Entry(
    variant="baseline",
    case="copy",
    axes=(("read", 4194304), ("write", 4194304)),
    dtype="int32",
    quant="none",
    options=(),
    policy="cold",
    config={"block": 1024, "warps": 8, "ctas": 0},
    evidence={"commit": "1234567", "source_hash": "abc"},
)


def test_digests_tell_kernels_grids_and_arguments_apart(tmp_path: Path) -> None:
    longer = replace(ENTRY, axes=(("read", 8388608), ("write", 8388608)))
    wider, unknown = replace(ENTRY, config={**ENTRY.config, "warps": 4}), replace(ENTRY, config={"tile": 1})
    asked = [("stream", entry) for entry in (ENTRY, ENTRY, longer, wider, unknown)] + [("gone", ENTRY)]
    (tmp_path / "asked").write_text(json.dumps([same._values(*pair) for pair in asked]))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(Path(launches.__file__).parents[2]), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    command = [sys.executable, "-P", launches.__file__, "kerneltune.ops", str(tmp_path / "asked"), str(tmp_path / "answer")]
    subprocess.run(command, env=env, check=True)
    (first, second, *others, broken, gone) = json.loads((tmp_path / "answer").read_text())
    assert first == second and first[0] == ops.load()["stream"].source_hash
    assert len({first[1], *(digest for _, digest in others)}) == 3
    assert broken == [first[0], ""] and gone == ["", ""]


@pytest.fixture
def revisions(monkeypatch: pytest.MonkeyPatch) -> dict[str, same.Found]:
    """What each commit's source is pretended to launch, by the folder that its work tree is in; "" is the present one."""
    found: dict[str, same.Found] = {}

    @contextmanager
    def checked_out(commit: str) -> Iterator[Path]:
        if commit not in found:
            raise ValueError(f"{commit!r}: no such revision")
        yield Path(commit)

    def launched(_operators: str, entries: Sequence[Any], tree: Path, _folder: Path) -> same.Found:
        return [*found.get(tree.name, found[""])][: len(entries)]

    monkeypatch.setattr(same, "checked_out", checked_out)
    monkeypatch.setattr(same, "_launched", launched)
    return found


@pytest.mark.parametrize(
    ("then", "now", "reason"),
    [
        (("abc", "1"), ("def", "1"), ""),
        (("abc", "1"), ("def", "2"), "it launches other kernels than at commit 1234567"),
        (("xyz", "1"), ("def", "1"), "commit 1234567 has not the source that was measured"),
        (("abc", ""), ("def", ""), "what it launches is not known at commit 1234567"),
        (("abc", "1"), ("def", ""), "what it launches is not known now"),
    ],
)
def test_an_entry_is_the_same_only_where_both_sources_say_so(
    then: tuple[str, str], now: tuple[str, str], reason: str, revisions: dict[str, same.Found]
) -> None:
    revisions.update({"1234567": [then], "": [now]})
    told: list[str] = []
    gone = replace(ENTRY, evidence={"commit": "fffffff"})
    assert same.differences("", [("stream", gone), ("stream", ENTRY)], told.append) == ["'fffffff': no such revision", reason]
    assert told == ["fffffff", "1234567"]


def test_the_command_gives_the_present_hash_to_what_launches_the_same(tmp_path: Path, revisions: dict[str, same.Found]) -> None:
    now = ops.load()["stream"].source_hash
    other = replace(ENTRY, axes=(("read", 1024), ("write", 1024)))
    fresh = replace(ENTRY, axes=(("read", 2048), ("write", 2048)), evidence={"source_hash": now})
    for entry in (ENTRY, other, fresh):
        cache.store("stream", "nvidia_h200", entry, tmp_path)
    revisions.update({"1234567": [("abc", "1"), ("abc", "2")], "": [(now, "0"), (now, "2")]})
    arguments = ["cache", "verify", "--configs", str(tmp_path), "--static"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[1:4] == [["nvidia_h200", "stream", status, "1"] for status in ("fresh", "same-code", "stale")]
    assert result.stdout.splitlines()[4] == "1 stale: it launches other kernels than at commit 1234567"
    assert CliRunner().invoke(app, [*arguments, "--write"]).exit_code == 0
    hashes = {e.axes[0][1]: e.evidence["source_hash"] for e in cache.load("stream", "nvidia_h200", tmp_path)}
    assert sorted(hashes.values()) == sorted([now, now, "abc"])
    (proven,) = [e for e in cache.load("stream", "nvidia_h200", tmp_path) if same.SAME_CODE in e.evidence]
    assert proven.evidence["commit"] == "1234567" and same.measured_hash(proven) == "abc"
    refused = CliRunner().invoke(app, ["cache", "verify", "--write", "--configs", str(tmp_path)])
    assert refused.exit_code == 2
    assert refused.stderr == "error: write: True: expected --static, or the entries' GPU in this machine\n"
