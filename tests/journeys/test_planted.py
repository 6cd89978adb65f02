"""Planted regressions stand in their files, and a planted tree is what its journey runs."""

import ast
import os
from pathlib import Path

import pytest
from journey import ROOT
from planted import PLANTS, Plant, copied, find
from runner import gpu_here


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_planted_text_occurs_once_in_its_file_and_stays_python(plant: Plant) -> None:
    text = (ROOT / plant.file).read_text()
    assert text.count(plant.old) == 1
    ast.parse(text.replace(plant.old, plant.new))


def test_plants_are_at_least_ten_and_name_existing_journeys() -> None:
    registered = "".join(path.read_text() for path in (ROOT / "tests" / "journeys").glob("*.py"))
    assert len(PLANTS) >= 10
    assert [plant.journey for plant in PLANTS if f"def {plant.journey}(place: Place)" not in registered] == []


def test_planted_regression_fails_its_journey_and_leaves_the_sources(tmp_path: Path) -> None:
    file = ROOT / "kerneltune" / "cli" / "doctor.py"
    before = file.read_bytes()
    os.environ.setdefault("TRITON_INTERPRET", "1")
    broken = Plant(
        "broken",
        "kerneltune/cli/doctor.py",
        'yield Finding("python"',
        'raise ValueError("planted"); yield Finding("python"',
        "doctor",
    )
    result = find(broken, tmp_path, gpu_here())
    assert (result.was_found, result.said.splitlines()[0]) == (True, "no: exit code 2, expected 0")
    assert "error: planted" in (tmp_path / "broken" / "doctor.txt").read_text()
    assert file.read_bytes() == before


def test_plant_whose_text_is_gone_raises_one_line(tmp_path: Path) -> None:
    plant = Plant("gone", "kerneltune/stats.py", "no such text", "", "doctor")
    with pytest.raises(ValueError, match=r"^gone: kerneltune/stats.py: 'no such text' stands there 0 times, expected 1$"):
        copied(plant, tmp_path)
