"""The proof of a GPU: journeys that passed, changed, failed or never ran; damaged files."""

import json
from pathlib import Path

import msgspec
import proof_file as proof
import pytest
from proof import digests, merge_proof, open_journeys, state_line
from proof_file import JourneyRun, load_proof, unproven

VERSIONS = {"driver": "580", "torch": "2.11", "triton": "3.6.0", "python": "3.12.3"}


def run(passed: bool = True, commit: str = "4010a35") -> JourneyRun:
    return JourneyRun(passed, commit, VERSIONS, "2026-11-25T23:10:00+00:00", 12.5, [])


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the package be a folder of two modules."""
    folder = tmp_path / "kerneltune"
    folder.mkdir()
    (folder / "a.py").write_text('"""Words."""\n\n\ndef f(x):\n    """Words."""\n    return x + 1  # why\n')
    (folder / "b.py").write_text("B = 1\n")
    monkeypatch.setattr(proof, "_PACKAGE", folder)
    proof.digest_of.cache_clear()
    yield folder
    proof.digest_of.cache_clear()


def write(path: Path, names: list[str], **runs: JourneyRun) -> None:
    code = digests(["kerneltune.a", "kerneltune.b", "kerneltune.gone"])
    merge_proof(path, "NVIDIA H200", {name: (one, code) for name, one in runs.items()}, names)


def test_comments_and_docstrings_change_no_digest_but_code_does(package: Path) -> None:
    before = proof.digest_of("kerneltune.a")
    (package / "a.py").write_text("def f(x):  # another\n    return (x +\n        1)\n")
    proof.digest_of.cache_clear()
    assert proof.digest_of("kerneltune.a") == before
    (package / "a.py").write_text("def f(x):\n    return x + 2\n")
    proof.digest_of.cache_clear()
    assert proof.digest_of("kerneltune.a") != before


def digest_of_a(package: Path, source: str) -> str:
    (package / "a.py").write_text(source)
    proof.digest_of.cache_clear()
    return proof.digest_of("kerneltune.a")


def test_renamed_private_names_change_no_digest_but_other_names_do(package: Path) -> None:
    source = "from b import _c\n_N = 1\n\ndef _f(x: int) -> int:\n    return _N + x._y\n\ndef g():\n    return _f(_c) + _N\n"
    before = digest_of_a(package, source)
    assert digest_of_a(package, source.replace("_N", "_M").replace("_f", "_sum")) == before
    for old, new in (("_f(_c) + _N", "_N(_c) + _f"), ("x._y", "x._z"), ("b import _c", "b import _d as _c"), (" g(", " h("),
                     ("x: int", "x: float"), ("return _f(_c) + _N", "return _f(_c) + _c")):  # fmt: skip
        assert digest_of_a(package, source.replace(old, new)) != before, new


def test_digest_is_the_same_under_every_python(package: Path) -> None:
    """Python 3.12 has other trees of nested format specifications than 3.11 and 3.13."""
    (package / "a.py").write_text('def f(x, mark, room):\n    return f"{x:{mark}{room}}" + ""\n')
    assert proof.digest_of("kerneltune.a") == "232dccdf"


def test_journeys_that_changed_failed_or_never_ran_are_listed(package: Path, tmp_path: Path) -> None:
    path, names = tmp_path / "nvidia_h200" / "proof.json", ["fine", "broken", "new"]
    write(path, names, fine=run(), broken=run(passed=False))
    proof_of = load_proof(path)
    assert dict(unproven(proof_of, names)) == {
        "broken": "failed at 4010a35, 2026-11-25",
        "new": "has not run on NVIDIA H200",
    }
    of_h200 = "on NVIDIA H200 (last run 2026-11-25 at 4010a35)"
    assert state_line([proof_of], names) == f"1 of 3 journeys of `make gpu` passed with the present code, {of_h200}"
    of_z = msgspec.structs.replace(proof_of, gpu="NVIDIA Z", journeys={"broken": proof_of.journeys["fine"]})
    assert state_line([proof_of, of_z], names) == (
        f"2 of 3 journeys of `make gpu` passed with the present code, 1 {of_h200}, 1 on NVIDIA Z (last run 2026-11-25 at 4010a35)"
    )
    assert open_journeys([proof_of, of_z], names) == {"new": ["has not run on NVIDIA H200", "has not run on NVIDIA Z"]}
    (package / "b.py").write_text("B = 2\n")
    proof.digest_of.cache_clear()
    assert dict(unproven(proof_of))["fine"] == "passed at 4010a35, 2026-11-25; changed since: b"


def test_later_run_replaces_its_journey_and_keeps_the_others(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "nvidia_h200" / "proof.json"
    write(path, ["one", "two", "old"], one=run(), two=run(), old=run())
    (package / "b.py").write_text("B = 2\n")
    proof.digest_of.cache_clear()
    write(path, ["one", "two"], two=run(commit="5000000"))
    merged = load_proof(path)
    assert {name: one.commit for name, one in merged.journeys.items()} == {"one": "4010a35", "two": "5000000"}
    assert dict(unproven(merged)) == {"one": "passed at 4010a35, 2026-11-25; changed since: b"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 9}, "schema: 9: expected 1"),
        ({"journeys": 3}, "journeys: 3: expected object"),
        ({"code": ["alone"]}, "code[0]: 'alone': expected a module and its digest"),
        ({"code": []}, "journeys.one.code: [0, 1]: expected numbers below 0"),
        ({"more": 1}, "more"),
        ({"gpu": "NVIDIA B200"}, "gpu: 'NVIDIA B200': expected the GPU of the folder nvidia_h200"),
        (None, "JSON: "),
    ],
)
def test_damaged_proof_warns_in_one_line_and_is_replaced(
    package: Path, tmp_path: Path, change: dict[str, object] | None, message: str
) -> None:
    path = tmp_path / "nvidia_h200" / "proof.json"
    write(path, ["one"], one=run())
    stored = json.loads(path.read_text())
    if message.startswith("code[0]"):
        stored["journeys"]["one"]["code"] = []
    path.write_text("{" if change is None else json.dumps(stored | change))
    with pytest.raises(ValueError) as caught:
        load_proof(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert str(caught.value).endswith(": treated as no proof")
    write(path, ["two"], two=run())
    assert list(load_proof(path).journeys) == ["two"]
