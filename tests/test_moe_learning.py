"""The example that learns: a few steps of a tiny model in every recipe, and what is read off its losses."""

import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "moe_learning"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def example_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


@pytest.mark.usefixtures("exact_casts")
def test_all_recipes_learn_alike() -> None:
    import train

    sizes = train.Sizes(width=32, hidden=16, experts=2, layers=1, heads=2, length=16)
    options = {"steps": 4, "batch": 2, "seed": 1, "device": DEVICE, "rate": 5e-2, "warmup": 1}
    found = {recipe: train.losses(recipe, sizes, **options) for recipe in train.RECIPES}
    for losses in found.values():
        assert losses[0] == pytest.approx(found["bf16"][0], rel=0.02)
        assert losses[-1] < losses[0] - 1
        assert losses[-1] == pytest.approx(found["bf16"][-1], rel=0.05)


def test_final_losses_and_their_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:  # type: ignore[no-untyped-def]
    import report

    file, picture = tmp_path / "losses.csv", tmp_path / "losses.svg"
    rows = [f"{step},{3 - step / 100},{3 - step / 100 + (0.015 if step >= 50 else 0)}" for step in range(100)]
    file.write_text("\n".join(["step,bf16,rowwise", *rows]) + "\n")
    columns = report.read(file)
    assert report.final(columns["bf16"]) == pytest.approx(3 - 0.745)
    assert report.differences(columns) == pytest.approx({"bf16": 0, "rowwise": 0.015 / 2.255})
    monkeypatch.setattr(sys, "argv", ["report.py", str(file), "--svg", str(picture)])
    with pytest.raises(SystemExit) as ended:
        report.main()
    assert ended.value.code == 0
    assert "rowwise      2.2700 nats per byte, mean of the last 50 steps (+0.67%)" in capsys.readouterr().out
    assert picture.read_text().startswith("<?xml")


@pytest.mark.gpu
def test_a_short_training_at_full_size() -> None:
    import train

    bf16, tensorwise = (train.losses(r, train.Sizes(), 40, 32, seed=0, device=DEVICE) for r in ("bf16", "tensorwise"))
    assert bf16[-1] < 3.0
    assert sum(tensorwise[-10:]) == pytest.approx(sum(bf16[-10:]), rel=0.03)
