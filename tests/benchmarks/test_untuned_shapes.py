"""Shapes left out: the config of a look-up without them, on made-up times and on times of GPUs."""

from dataclasses import replace
from pathlib import Path

import pytest
import untuned_shapes
from fake_tuner import SMALL, Small, op_of
from kept_trials import TrialBlock, path_of, write

from kerneltune import cache, ops
from kerneltune.files import data_root
from kerneltune.spec import Case
from kerneltune.task import Evaluation, knob_pairs

GPU = "nvidia_h200"
OP = replace(op_of(SMALL), free_axes=("M",))
RUN = {
    "op": OP.name,
    "variant": "optimized",
    "policy": "cold",
    "device": "NVIDIA H200",
    "driver": "1",
    "torch": "2",
    "triton": "3",
    "source_hash": "4",
    "commit": "a",
    "date": "2026-11-26",
}
DEFAULT, LARGE = Small(256, 4), Small(1024, 8)


def case(size: int) -> Case:
    return Case("a", (("M", size),), "bfloat16")


def test_left_out_shape_is_served_by_a_near_config_or_the_default(tmp_path: Path) -> None:
    rows = []
    tuned = {8: LARGE, 16: DEFAULT, 4096: LARGE}
    for size, config in tuned.items():
        times = {DEFAULT: Evaluation("passed", 10.0), LARGE: Evaluation("passed", 8.0 if size != 16 else 20.0)}
        rows += [(case(size), knob_pairs(timed), trial) for timed, trial in times.items()]
        knobs = {"block": config.block, "warps": config.warps}
        values = {"variant": "optimized", "case": "a", "axes": {"M": size}, "dtype": "bfloat16", "quant": "none", "options": {}}
        cache.store(
            GPU, cache.entry_from(OP.name, {**values, "policy": "cold", "config": knobs, "evidence": {"time_us": 7.0}}), tmp_path
        )
    write(path_of(OP.name, GPU, tmp_path), [TrialBlock(**RUN, rows=tuple(rows))])
    measured = untuned_shapes.known(OP, SMALL, GPU, tmp_path, tmp_path)
    assert {of["M"]: measured.best_us(of) for of in measured.times} == {8: 8.0, 16: 10.0, 4096: 8.0}
    row = untuned_shapes.row(OP, SMALL, measured, 4.0)
    assert row.values[:3] == (OP.name, 3, 3)
    assert row.values[3:] == pytest.approx(((0.8 * 0.8) ** (1 / 3), 0.8, 3, (0.8 * 0.5 * 0.8) ** (1 / 3), 0.5, case(16).label))
    assert untuned_shapes.default_shares(SMALL, measured) == {
        case(8): (0.8, 10.0, 8.0), case(16): (1.0, 10.0, 10.0), case(4096): (0.8, 10.0, 8.0)
    }  # fmt: skip
    assert untuned_shapes.row(OP, SMALL, measured, 0.5).values[3] == untuned_shapes.row(OP, SMALL, measured, 0.5).values[6]


NAMES = [path.stem for path in sorted((data_root("configs") / GPU).glob("*.json")) if path_of(path.stem).exists()]


@pytest.mark.parametrize("name", NAMES)
def test_untuned_shapes_of_an_operator_reach_the_speed_that_the_page_states(name: str) -> None:
    op = ops.load()[name]
    measured = untuned_shapes.known(op, op.variant("optimized"), GPU, configs=data_root("configs"))
    row = untuned_shapes.row(op, op.variant("optimized"), measured, op.max_distance)
    geomean, worst = row.values[6:8]
    assert geomean >= 0.97
    assert worst >= 0.8


def test_defaults_of_rmsnorm_at_rows_of_uneven_length_reach_the_tuned_speed_of_an_h100(tmp_path: Path) -> None:
    op = ops.load()["rmsnorm_fwd"]
    measured = untuned_shapes.known(op, op.variant("optimized"), "nvidia_h100_80gb_hbm3", configs=tmp_path)
    cases, num_known, geomean, worst = untuned_shapes.row(op, op.variant("optimized"), measured, op.max_distance).values[1:5]
    assert (cases, num_known) == (16, 15)
    assert geomean >= 0.98
    assert worst >= 0.97
