"""The example that learns: a few steps of a tiny model in every recipe, and the verdict on its losses."""

import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).parents[1] / "examples" / "moe_learning"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def example_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


def test_every_recipe_ends_at_the_loss_of_bf16() -> None:
    import train

    sizes = train.Sizes(width=32, hidden=16, experts=2, layers=1, heads=2, length=4)
    options = {"steps": 4, "batch": 2, "seed": 1, "device": DEVICE, "rate": 5e-2, "warmup": 1}
    losses_of = {recipe: train.losses(recipe, sizes, **options) for recipe in train.RECIPES}
    for losses in losses_of.values():
        assert losses[0] == pytest.approx(losses_of["bf16"][0], rel=0.02)
        assert losses[-1] < losses[0] - 1
        assert losses[-1] == pytest.approx(losses_of["bf16"][-1], rel=0.05)


@pytest.mark.parametrize(("off", "code"), [(0.005, 0), (0.015, 1)])
def test_moe_learning_writes_losses_and_exits_with_1_where_they_end_apart(
    off: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train

    file = tmp_path / "losses.csv"
    made_up = {"bf16": 2.0, "rowwise": 2.0 - 2 * off, "tensorwise": 2.0 + 0.002, "delayed": 2.0}
    monkeypatch.setattr(train, "losses", lambda recipe, _sizes, steps, _batch, **_: [made_up[recipe]] * steps)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["train.py", "--steps", "60", "--output", str(file)])
    with pytest.raises(SystemExit) as ended:
        train.main()
    assert ended.value.code == code
    assert f"rowwise      {2 - 2 * off:.4f} nats per byte, mean of the last 50 steps ({-off:+.2%})" in capsys.readouterr().out
    head, *lines = file.read_text().splitlines()
    assert head == "step,bf16,rowwise,tensorwise,delayed"
    assert (len(lines), lines[-1]) == (60, f"59,2.000000,{2 - 2 * off:.6f},2.002000,2.000000")


@pytest.mark.gpu
def test_training_at_full_size_ends_at_the_loss_of_bf16() -> None:
    import train

    bf16, tensorwise = (train.losses(r, train.Sizes(), 40, 32, seed=0, device=DEVICE) for r in ("bf16", "tensorwise"))
    assert bf16[-1] < 3.0
    assert sum(tensorwise[-10:]) == pytest.approx(sum(bf16[-10:]), rel=0.03)
