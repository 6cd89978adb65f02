"""Kernels that were compiled before: their file, what decides a digest, and that what is shipped is what compiling says."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kerneltune import cache, ops
from kerneltune.inspection.static import Survey
from kerneltune.inspection.survey import cached_runs, survey
from kerneltune.measuring import inspected
from kerneltune.measuring.assembly import LIMITS, Access, Fact, Kernel
from kerneltune.measuring.compiler import TARGETS, CompilePool, compile_job
from kerneltune.measuring.inspected import KnownFacts
from kerneltune.ops.int4_gemm.baselines.plain import PlainConfig
from kerneltune.ops.stream import StreamConfig
from kerneltune.search.task import Run, Task
from kerneltune.spec import Case

ACCESSES = (Access("load", 128, 4), Access("load", 32, 1), Access("store", 64, 2))
FACT = Fact(Kernel("_k", 4, 40, 8, 1024, 96, ACCESSES, True, 3), 256)
REFUSED = Fact(Kernel("_large", 8, 0, 0, 163840))


def test_facts_survive_their_file(tmp_path: Path) -> None:
    facts = {"b" * 20: FACT, "a" * 20: REFUSED}
    inspected.save(tmp_path, "sm_90", facts)
    assert inspected.load(tmp_path, "sm_90").facts == facts
    assert inspected.load(tmp_path, "sm_100").facts == {}
    lines = (tmp_path / "sm_90.tsv").read_text().splitlines()
    assert lines[0].startswith("# read by ")
    assert [line.split("\t")[0] for line in lines[1:]] == ["kernel", "_k", "_large"]
    assert {len(line.split("\t")) for line in lines[1:]} == {13}


@pytest.mark.parametrize(
    "damage", [("\t40\t", "\t39\t"), ("128x4", "128x5"), ("b" * 20, "c" * 20), ("_k", "_j"), ("\t40\t", "<<<<"), ("1024", "")]
)
def test_a_damaged_line_is_not_believed(damage: tuple[str, str], tmp_path: Path) -> None:
    inspected.save(tmp_path, "sm_90", {"b" * 20: FACT, "a" * 20: REFUSED})
    path = tmp_path / "sm_90.tsv"
    path.write_text(path.read_text().replace(*damage))
    assert inspected.load(tmp_path, "sm_90").facts == {"a" * 20: REFUSED}
    path.write_bytes(b"\xff" + path.read_bytes())
    assert inspected.load(tmp_path, "sm_90").facts == {}


def test_what_other_code_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inspected.save(tmp_path, "sm_90", {"b" * 20: FACT})
    assert not inspected.load(tmp_path, "sm_90").refused
    assert not inspected.load(tmp_path, "sm_100").refused
    monkeypatch.setattr(inspected, "reader_digest", lambda: "changed")
    assert inspected.load(tmp_path, "sm_90") == KnownFacts({}, refused=True)
    path = tmp_path / "sm_90.tsv"
    path.write_text(path.read_text().partition("\n")[2])  # as files were before they said who read them
    assert inspected.load(tmp_path, "sm_90") == KnownFacts({}, refused=True)


def ir(file: str, *lines: int, inner: int = 0) -> SimpleNamespace:
    places = "".join(f'#loc{n} = loc("{file}":{line}:7)\n#in{n} = loc("/lib/tl.py":{inner}:3)\n' for n, line in enumerate(lines))
    return SimpleNamespace(str=lambda: f'module {{"ttg.num-warps" = 4 : i32}}\n{places}')


def test_a_kernel_that_moved_is_known_and_one_with_other_joints_is_not() -> None:
    text = inspected.ir_text(ir("/a/kernels.py", 10, 12, 12))
    assert text == inspected.ir_text(ir("/b/c/moved.py", 110, 125, 125, inner=9))
    assert text != inspected.ir_text(ir("/a/kernels.py", 10, 12, 13))
    assert text != inspected.ir_text(ir("/a/kernels.py", 10, 10, 12))
    assert text != inspected.ir_text(ir("/lib/tl.py", 10, 12, 12))  # one file, not two
    assert "/a/" not in text
    assert '"ttg.num-warps" = 4' in text


def test_what_other_code_read_is_not_found_in_the_disk_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(facts: dict[str, Fact], shared_bytes: int) -> str:
        return inspected.Inspecting(KnownFacts(facts), "cuda", shared_bytes).folder

    keys = [key({}, 1024), key({"a" * 20: FACT}, 1024), key({}, 2048)]
    assert key({}, 1024) == keys[0]
    monkeypatch.setattr(inspected, "module_digest", {inspected.__name__: "changed"}.__getitem__)
    assert len({*keys, key({}, 1024)}) == 4


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's disk cache, empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


def requested(op: str, case: Case, config: Any) -> Run:
    found = ops.load()[op]
    options = tuple((name, values[0]) for name, values in found.options.items())
    return Task(found, replace(case, options=options), found.variant("baseline")), config


def texts(folder: Path, suffix: str) -> list[str]:
    return [path.read_text() for path in folder.rglob(f"*.{suffix}")]


def test_what_is_known_is_not_compiled_and_what_is_not_known_is(own_cache: Path) -> None:
    case = Case("s", (("read", 1 << 20), ("write", 1 << 20)), "int32")
    asked = [requested("stream", case, StreamConfig(1024, warps, 0)) for warps in (4, 8)]
    first = survey(asked, ["sm_90"], 1)
    facts = first.facts["sm_90"]
    assert len(facts) == len(texts(own_cache, "ptx")) == 2
    assert first.unknown == 0
    (digest, fact), _other = facts.items()
    told = KnownFacts({digest: Fact(replace(fact.kernel, registers=7))})
    second = survey(asked, ["sm_90"], 1, known={"sm_90": told})
    assert second.unknown == 1
    assert second.facts["sm_90"] == facts | told.facts
    assert sorted(texts(own_cache, "ptx"))[0] == ""
    assert len(texts(own_cache, "ptx")) == 4
    assert {kernel.registers for row in second.rows for kernel in row.kernels} > {7}


def test_an_inspection_leaves_nothing_that_a_launch_finds(own_cache: Path) -> None:
    """Where it shared Triton's entries, a kernel that was inspected was launched without its binary."""
    request = requested("stream", Case("s", (("read", 1 << 20), ("write", 1 << 20)), "int32"), StreamConfig(1024, 4, 0))
    inspected_row = survey([request], ["sm_90"], 1).rows[0]
    assert [path.stat().st_size for path in own_cache.rglob("*.cubin")] == [0]
    with CompilePool(TARGETS["sm_90"], 1) as pool:
        (compiled,) = pool.compile([compile_job(*request)])
    assert compiled.kernels == inspected_row.kernels
    assert compiled.facts == {}
    assert [path.stat().st_size > 1000 for path in own_cache.glob("*/*.cubin")] == [True]


def test_what_exceeds_shared_memory_says_the_same_when_known(own_cache: Path) -> None:
    case = Case("product", tuple((axis, 512) for axis in ops.load()["int4_gemm"].axes), "bfloat16", "int4")
    large = [requested("int4_gemm", case, PlainConfig(64, 64, 128, 4, 6))]
    first = survey(large, ["gfx942"], 1)
    second = survey(large, ["gfx942"], 1, known={"gfx942": KnownFacts(first.facts["gfx942"])})
    assert second == first
    assert second.unknown == 0
    assert second.facts == first.facts
    assert "out of resource: shared memory" in first.rows[0].error
    assert not any(texts(own_cache, "amdgcn"))


def test_what_is_shipped_was_read_by_this_code() -> None:
    """After a change of what reads the compiler's output: `kerneltune inspect --renew`."""
    assert [target for target in LIMITS if inspected.load(inspected.shipped(), target).refused] == []


def test_what_is_shipped_is_what_compiling_says(own_cache: Path) -> None:
    """A few configs, others in every run: facts that are shipped and not true do not stay."""
    drawn = random.Random()
    cached = cached_runs(ops.load().values(), cache.roots(), "nvidia_h200")
    asked, target = drawn.sample(cached, 3), drawn.choice([*LIMITS])
    shipped = inspected.load(inspected.shipped(), target).facts
    found: Survey = survey(asked, [target])
    both = found.facts[target].keys() & shipped.keys()
    labels = [row.label for row in found.rows]
    assert {digest: shipped[digest] for digest in both} == {digest: found.facts[target][digest] for digest in both}, labels
    if not both:
        pytest.skip(f"nothing of {', '.join(labels)} is shipped: `kerneltune inspect --renew`")
