"""Facts of compiled configs and their file, on small literal rows."""

from pathlib import Path
from typing import Any

import pytest

from kerneltune.inspection.static import StaticRow, Survey, load, save
from kerneltune.measuring.assembly import Access, Kernel

WIDE = (Access("load", 128, 4), Access("load", 32, 2), Access("store", 128, 2))
KERNEL = Kernel("_k", 4, 40, 0, 1024, 0, WIDE)


def row(*kernels: Kernel, **changes: Any) -> StaticRow:
    values = {"op": "rms", "variant": "optimized", "case": "c M=1 bfloat16 none fast=True", "policy": "cold", "target": "sm_90"}
    return StaticRow(**{**values, "config": {"warps": 4}, "kernels": kernels, **changes})


def test_load_after_save_returns_the_same_survey(tmp_path: Path) -> None:
    survey = Survey("3.7.1", (row(KERNEL, KERNEL), row(error="x", target="gfx942", config={"split": True})))
    save(tmp_path / "a.json", survey)
    loaded = load(tmp_path / "a.json")
    assert loaded.triton == "3.7.1"
    assert sorted(loaded.rows, key=lambda r: r.target) == sorted(survey.rows, key=lambda r: r.target)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_case_parts_of_a_row_are_name_sizes_type_and_mode() -> None:
    assert row(KERNEL).case_parts() == ("c", ["M=1", "fast=True"], "bfloat16", "none")


@pytest.mark.parametrize("case", ["", "c", "c M=1 bfloat16", "c M=1 bfloat16 none more"])
def test_load_of_a_row_with_another_form_of_case_raises_one_line(case: str, tmp_path: Path) -> None:
    save(tmp_path / "a.json", Survey("3.7.1", (row(KERNEL), row(KERNEL, case="d M=1 bfloat16 none", op="x"))))
    text = (tmp_path / "a.json").read_text()
    (tmp_path / "a.json").write_text(text.replace("d M=1 bfloat16 none", case))
    with pytest.raises(ValueError) as caught:
        load(tmp_path / "a.json")
    form = "expected a name, sizes, an element type and a mode, such as `c M=8 bfloat16 none`"
    assert str(caught.value) == f"{tmp_path / 'a.json'}: rows[1]: case: {case!r}: {form}"


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
def test_load_of_a_broken_file_raises_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}{message}")
    assert "\n" not in str(caught.value)


def test_load_of_a_missing_file_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*: No such file"):
        load(tmp_path / "none.json")
