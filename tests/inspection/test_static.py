"""The static gate and its file, on small literal rows."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kerneltune.inspection.static import StaticRow, StaticVerdict, Survey, changed_facts, load, save, static_gate
from kerneltune.measuring.assembly import Access, Kernel

WIDE = (Access("load", 128, 4), Access("load", 32, 2), Access("store", 128, 2))
KERNEL = Kernel("_k", 4, 40, 0, 1024, 0, WIDE)


def row(*kernels: Kernel, **changes: Any) -> StaticRow:
    values = {"op": "rms", "variant": "optimized", "case": "c M=1", "policy": "cold", "target": "sm_90", "config": {"warps": 4}}
    return StaticRow(**{**values, "kernels": kernels, **changes})


def judged(old: list[StaticRow], new: list[StaticRow]) -> StaticVerdict:
    return static_gate(Survey("3.7.1", tuple(old)), Survey("3.7.1", tuple(new)))


def with_(**changes: Any) -> Kernel:
    return dataclasses.replace(KERNEL, **changes)


def test_the_same_passes() -> None:
    verdict = judged([row(KERNEL)], [row(KERNEL)])
    assert verdict == StaticVerdict(
        (), "pass: no new spills, no narrower accesses, nothing over a limit; 1 compared, 0 new, 0 gone, 0 broken in both", 0
    )


@pytest.mark.parametrize(
    ("kernel", "finding"),
    [
        (with_(spill_bytes=8), "_k: spills 8 bytes per thread, was 0"),
        (with_(accesses=(Access("load", 64, 8), *WIDE[2:])), "_k: loads are 64 bits wide, were 128"),
        (with_(accesses=(*WIDE[:2], Access("store", 32, 8))), "_k: stores are 32 bits wide, were 128"),
        (with_(name="_other", spill_bytes=8), "_other: spills 8 bytes per thread, was 0"),
    ],
)
def test_a_worse_kernel_fails(kernel: Kernel, finding: str) -> None:
    verdict = judged([row(KERNEL)], [row(kernel)])
    assert verdict.findings == (f"rms optimized c M=1 sm_90: {finding}",)
    assert verdict.exit_code == 1
    assert verdict.summary.startswith("static regression: 1 found; 1 compared")


@pytest.mark.parametrize(
    "kernel",
    [
        with_(registers=255),
        with_(accesses=(Access("load", 128, 9), Access("load", 32, 9), *WIDE[2:])),
        with_(accesses=WIDE[:2]),
        with_(name="_other", accesses=(Access("load", 8, 1),)),
    ],
)
def test_what_is_not_worse_passes(kernel: Kernel) -> None:
    assert judged([row(KERNEL)], [row(kernel)]).exit_code == 0


def test_the_second_launch_of_a_kernel_has_a_counterpart_of_its_own() -> None:
    spilling = with_(spill_bytes=16)
    assert judged([row(KERNEL, spilling)], [row(KERNEL, spilling)]).exit_code == 0
    assert judged([row(KERNEL, spilling)], [row(spilling, KERNEL)]).exit_code == 1


def test_a_config_that_no_longer_fits_fails() -> None:
    broken = row(error="OutOfResources: shared memory")
    assert judged([row(KERNEL)], [broken]).findings == ("rms optimized c M=1 sm_90: OutOfResources: shared memory",)
    assert judged([], [broken]).exit_code == 1  # a new row that does not build
    assert judged([row(KERNEL), row(error="a", case="d")], [row(KERNEL), row(error="b", case="d")]).exit_code == 0
    assert judged([broken], [row(KERNEL)]).exit_code == 0


def test_nothing_compared_is_no_pass() -> None:
    assert judged([row(KERNEL)], [row(KERNEL, target="gfx942")]).exit_code == 2
    assert judged([], []).summary == "nothing compared: 0 compared, 0 new, 0 gone, 0 broken in both"
    other = static_gate(Survey("3.6.0", (row(KERNEL),)), Survey("3.7.1", (row(KERNEL),)))
    assert (other.exit_code, other.summary) == (2, "not comparable: baseline made with triton 3.6.0, here 3.7.1")


def test_differences_name_what_changed() -> None:
    found = changed_facts(row(KERNEL), row(with_(registers=136, accesses=WIDE[:1])))
    assert found == [
        ("_k", "registers", "40", "136"),
        ("_k", "programs", "12", "3"),
        ("_k", "resident warps", "48/64", "12/64"),
        ("_k", "loads", "128x4 32x2", "128x4"),
        ("_k", "stores", "128x2", "-"),
    ]
    assert changed_facts(row(KERNEL), row(KERNEL)) == []
    assert changed_facts(row(KERNEL), row(error="no"))[0] == ("", "error", "-", "no")


def test_a_survey_survives_its_file(tmp_path: Path) -> None:
    survey = Survey("3.7.1", (row(KERNEL, KERNEL), row(error="x", target="gfx942", config={"split": True})))
    save(tmp_path / "a.json", survey)
    found = load(tmp_path / "a.json")
    assert found.triton == "3.7.1"
    assert sorted(found.rows, key=lambda r: r.target) == sorted(survey.rows, key=lambda r: r.target)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", ": JSON: "),
        ("[]", ": JSON: []: expected object"),
        ('{"schema": 2, "rows": []}', ": schema: 2: expected 1"),
        ('{"schema": 1, "triton": "3", "rows": [3]}', ": rows[0]: "),
        ('{"schema": 1, "triton": "3", "rows": [{"op": "a", "kernels": []}]}', ": rows[0].variant: missing"),
    ],
)
def test_a_broken_file_is_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}{message}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*: No such file"):
        load(tmp_path / "none.json")
