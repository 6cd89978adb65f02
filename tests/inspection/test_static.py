"""Facts of compiled configs and their file, on small literal rows."""

from pathlib import Path
from typing import Any

import pytest

from kerneltune.inspection.static import StaticRow, Survey, load, save
from kerneltune.measuring.assembly import Access, Kernel

WIDE = (Access("load", 128, 4), Access("load", 32, 2), Access("store", 128, 2))
KERNEL = Kernel("_k", 4, 40, 0, 1024, 0, WIDE)


def row(*kernels: Kernel, **changes: Any) -> StaticRow:
    values = {"op": "rms", "variant": "optimized", "case": "c M=1", "policy": "cold", "target": "sm_90", "config": {"warps": 4}}
    return StaticRow(**{**values, "kernels": kernels, **changes})


def test_load_after_save_returns_the_same_survey(tmp_path: Path) -> None:
    survey = Survey("3.7.1", (row(KERNEL, KERNEL), row(error="x", target="gfx942", config={"split": True})))
    save(tmp_path / "a.json", survey)
    loaded = load(tmp_path / "a.json")
    assert loaded.triton == "3.7.1"
    assert sorted(loaded.rows, key=lambda r: r.target) == sorted(survey.rows, key=lambda r: r.target)
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
