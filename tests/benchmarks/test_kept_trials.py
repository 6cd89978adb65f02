"""Kept trials as files: they come back as they were written, none is added twice, and journals become blocks."""

from dataclasses import replace
from pathlib import Path

import landscapes
import pytest
from kept_trials import TrialBlock, add, blocks_of, path_of, read, whole_spaces, write

from kerneltune import ops
from kerneltune.search.trials import TrialStore, history
from kerneltune.spec import Case
from kerneltune.task import Evaluation, Task, knob_pairs

SPACE = landscapes.space(0)
MIGRATED = {
    "fp8_colwise_3d": (171, 65338.9), "fp8_group_both": (297, 63800.8), "fp8_group_colwise": (5, 247.3),
    "fp8_group_colwise_dual": (133, 30091.8), "fp8_grouped_gemm": (1265, 970689.9), "fp8_rowwise_2d": (10, 160.2),
    "fp8_rowwise_3d_both": (538, 313929.3), "fp8_rowwise_3d_transpose": (206, 76789.1), "fp8_swiglu_2d": (124, 40582.9),
    "fp8_swiglu_bwd_2d": (59, 39039.3), "fp8_tensorwise_2d": (291, 27582.2), "fp8_tensorwise_3d": (213, 75310.8),
    "fp8_tensorwise_group": (285, 36288.8), "fp8_transpose_2d": (536, 53395.8), "int4_gemm": (451, 9642.4),
    "moe_permute": (45, 8965.8), "moe_permute_fp8": (40, 10629.9), "moe_unpermute": (59, 11702.8),
    "moe_unpermute_bwd": (37, 14999.3), "multi_cast_transpose": (24, 7584.5), "rmsnorm_add_bwd": (734, 119323.0),
    "rmsnorm_add_fwd": (216, 34479.5), "rmsnorm_bwd": (1513, 286671.3), "rmsnorm_fwd": (2536, 174723.0),
}  # fmt: skip
"""Operator -> number of trials and sum of their times in µs in the observations and spaces that were merged on 2026-11-25."""


def block(size: int = 8, option: str = "row", width: int = 64, time_us: float | None = 1.5, commit: str = "abc") -> TrialBlock:
    """Return a block of a single trial, with an option named like a column."""
    case = Case("m", (("M", size),), "bfloat16", "none", (("status", option),))
    trial = Evaluation("passed" if time_us else "spills", time_us, "", 128, 0, 1024)
    return TrialBlock(
        op="fake", variant="optimized", policy="cold", device="NVIDIA H200", driver="1", torch="2", triton="3", source_hash="4",
        commit=commit, date="2026-11-23", rows=((case, (("width", width), ("warps", 4)), trial),),
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return path_of("fake", root=tmp_path)


def test_read_after_write_returns_the_same_blocks(path: Path) -> None:
    blocks = [block(), replace(block(16, "col", 128), commit="def"), block(16, width=256, time_us=None)]
    write(path, blocks)
    assert read(path) == blocks
    assert read(path)[0].rows[0][2].program_registers == 128
    assert (read(path)[1].rows[0][2].date, read(path)[1].rows[0][2].commit) == ("2026-11-23", "def")
    before = path.read_bytes()
    write(path, read(path))
    assert path.read_bytes() == before
    assert read(path.with_name("none.csv.gz")) == []


def test_whole_space_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = path_of("made_up", "none", tmp_path)
    add(path, SPACE)
    (again,) = read(path)
    assert (list(again.trials), again.default, again.case.axes) == (list(SPACE.trials), SPACE.default, SPACE.case.axes)
    for knobs, trial in SPACE.trials.items():
        read_trial = again.trials[knobs]
        assert (read_trial.status, read_trial.program_registers, read_trial.spill_bytes) == (
            trial.status,
            trial.program_registers,
            trial.spill_bytes,
        )
        assert read_trial.time_us == (None if trial.time_us is None else pytest.approx(trial.time_us, rel=1e-5))
    assert again.name == "made_up_optimized_made_up_0_bfloat16_none_cold"


def test_adding_a_row_again_adds_nothing(path: Path) -> None:
    add(path, block())
    add(path, block(16))
    add(path, block(16))
    assert [[case["M"] for case, *_ in one.rows] for one in read(path)] == [[8], [16]]
    add(path, block(16, time_us=2.0, commit="def"))
    assert [one.commit for one in read(path)] == ["abc", "abc", "def"]
    add(path, block(8, commit="ghi"))
    assert len(read(path)) == 3


def test_whole_spaces_returns_the_newest_of_a_space_added_twice(tmp_path: Path) -> None:
    path = path_of("made_up", "none", tmp_path)
    add(path, SPACE)
    before = path.read_bytes()
    add(path, SPACE)
    assert path.read_bytes() == before
    (case, knobs, trial), *others = SPACE.rows
    changed = replace(SPACE, date="later", rows=((case, knobs, replace(trial, time_us=1.0)), *others))
    add(path, changed)
    assert [len(one.rows) for one in read(path)] == [len(SPACE.rows)] * 2
    assert [(space.name, space.date) for space in whole_spaces(tmp_path)] == [(SPACE.name, "later")]


@pytest.mark.parametrize("op", MIGRATED)
def test_shipped_trials_have_every_migrated_trial(op: str) -> None:
    blocks = [one for one in read(path_of(op)) if one.date < "2026-11-25"]
    times = [trial.time_us or 0.0 for one in blocks for *_, trial in one.rows]
    assert (len(times), sum(times)) == (MIGRATED[op][0], pytest.approx(MIGRATED[op][1], abs=0.06))


def test_blocks_of_a_journal_are_whole_spaces_and_other_trials(tmp_path: Path) -> None:
    op = ops.load()["fp8_transpose_2d"]
    variant = op.variant("optimized")
    software = {"driver": "1", "torch": "2", "triton": "3", "source_hash": "4"}
    store = TrialStore(tmp_path / "fp8_transpose_2d.log", "abc", **software)
    small, large = (Case("a", (("M", size), ("N", 64)), "uint8", "fp8", (("fp8_format", "e4m3"),)) for size in (64, 128))
    for case, configs in ((small, list(variant.configs(small))), (large, list(variant.configs(large))[:3])):
        for number, config in enumerate(configs, start=1):
            store.put(Task(op, case, variant), config, Evaluation("passed", float(number)))
    store.put(Task(op, large, variant), list(variant.configs(large))[3], Evaluation("crashed"))  # perhaps not its fault
    space, others = blocks_of(history(tmp_path / "fp8_transpose_2d.log"), "NVIDIA H200")
    assert (space.case, space.default) == (small, knob_pairs(variant.default_config(small)))
    assert {knobs for _, knobs, _ in space.rows} == {knob_pairs(config) for config in variant.configs(small)}
    assert ({case for case, *_ in others.rows}, len(others.rows), others.default) == ({large}, 3, ())
    assert (others.op, others.device, others.driver, others.commit) == (op.name, "NVIDIA H200", "1", "abc")
    write(path_of(op.name, root=tmp_path), [space, others])
    assert [len(one.rows) for one in read(path_of(op.name, root=tmp_path))] == [len(space.rows), 3]
