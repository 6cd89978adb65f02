"""Kept trials as files: they come back as they were written, none is added twice, and damage is one line."""

import gzip
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import landscapes
import pytest
from started import environment

from kerneltune.files import data_root
from kerneltune.search.task import Evaluation
from kerneltune.search.trial_table import SUFFIX, TrialBlock, add, read, table_path, whole_spaces, write
from kerneltune.spec import Case

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
    """Return a block of one trial, with an option that is called as a column is."""
    case = Case("m", (("M", size),), "bfloat16", "none", (("status", option),))
    trial = Evaluation("ok" if time_us else "spills", time_us, "", 128, 0, 1024)
    return TrialBlock(
        op="fake", variant="optimized", policy="cold", device="NVIDIA H200", driver="1", torch="2", triton="3", source_hash="4",
        commit=commit, date="2026-11-23", rows=((case, (("width", width), ("warps", 4)), trial),),
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return table_path(tmp_path, "nvidia_h200", "fake")


def test_blocks_come_back_as_they_were_written(path: Path) -> None:
    blocks = [block(), replace(block(16, "col", 128), commit="def"), block(16, width=256, time_us=None)]
    write(path, blocks)
    assert read(path) == blocks
    assert read(path)[0].rows[0][2].resources == 128
    assert (read(path)[1].rows[0][2].date, read(path)[1].rows[0][2].commit) == ("2026-11-23", "def")
    before = path.read_bytes()
    write(path, read(path))
    assert path.read_bytes() == before
    assert read(path.with_name("none.csv.gz")) == []


def test_a_whole_space_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = table_path(tmp_path, "none", "made_up")
    add(path, SPACE)
    (again,) = read(path)
    assert (list(again.trials), again.default, again.case.axes) == (list(SPACE.trials), SPACE.default, SPACE.case.axes)
    for knobs, trial in SPACE.trials.items():
        found = again.trials[knobs]
        assert (found.status, found.resources, found.spill_bytes) == (trial.status, trial.resources, trial.spill_bytes)
        assert found.time_us == (None if trial.time_us is None else pytest.approx(trial.time_us, rel=1e-5))
    assert again.name == "made_up_optimized_made_up_0_bfloat16_none_cold"


def test_rows_of_one_run_share_a_block_and_no_row_is_added_twice(path: Path) -> None:
    add(path, block())
    add(path, block(16))
    add(path, block(16))
    assert [[case["M"] for case, *_ in one.rows] for one in read(path)] == [[8, 16]]
    add(path, block(16, time_us=2.0, commit="def"))
    assert [(one.commit, len(one.rows)) for one in read(path)] == [("abc", 2), ("def", 1)]
    add(path, block(8, commit="ghi"))
    assert len(read(path)) == 2


def test_a_space_is_added_whole_and_the_newest_is_found(tmp_path: Path) -> None:
    path = table_path(tmp_path, "none", "made_up")
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
def test_shipped_files_hold_every_trial_of_the_observations_and_spaces(op: str) -> None:
    blocks = [one for one in read(table_path(data_root("results"), "nvidia_h200", op)) if one.date < "2026-11-25"]
    times = [trial.time_us or 0.0 for one in blocks for *_, trial in one.rows]
    assert (len(times), sum(times)) == (MIGRATED[op][0], pytest.approx(MIGRATED[op][1], abs=0.06))


def broken(change: Callable[[str], str], path: Path) -> str:
    """Return the message of reading a file whose text is changed."""
    changed = change(text := gzip.decompress(path.read_bytes()).decode())
    assert changed != text
    path.write_bytes(gzip.compress(changed.encode()))
    with pytest.raises(ValueError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"schema": 2', '"schema": 7', ":1: header: schema: 7: expected 2"),
        ('"op": "fake"', '"op": "other"', ":1: header: op: 'other': expected 'fake'"),
        ('"op": "fake", ', "", ":1: header: op: missing"),
        ("# {", "# [", ":1: header: '# ["),
        ('"axes": [', '"axes": 5, "x": [', ":1: header: axes: 5: expected array"),
        ('"axes": ["M"', '"axes": ' + "[" * 100_000 + '"M"', ":1: header: "),
        ('"width": "int"', '"class": "int"', ":1: header: knobs: 'class': expected the name of a knob"),
        ('"int"', '"eval"', ":1: header"),
        ('"default": {}', '"default": {"x": 1}', ":1: header: default: 'x': expected a value of width, warps"),
        (",warps\n", ",warp\n", ":2: columns"),
        (",1.5,", ",-1.5,", ":3: not a trial"),
        (",1.5,", ",,", ":3: not a trial"),
        (",1.5,", ",nan,", ":3: not a trial"),
        (",64,4", ",x,4", ":3: not a trial"),
        (",64,4", ",64", ":3: not a trial"),
        (",64,4", f",{'6' * 5000},4", ":3: not a trial"),
        (",64,4", f",{'6' * 200_000},4", ":3: not a trial: field larger than field limit"),
        (",ok,", ",spills,", ":3: not a trial"),
        (",16,", ",sixteen,", ":6: not a trial"),
    ],
)
def test_damage_is_one_line_with_file_and_line(old: str, new: str, message: str, path: Path) -> None:
    write(path, [block(), replace(block(16), commit="def")])
    assert broken(lambda text: text.replace(old, new, 1), path).startswith(message)


def test_a_file_without_a_trial_is_one_line(path: Path) -> None:
    write(path, [block()])
    assert broken(lambda text: "".join(text.splitlines(keepends=True)[:2]), path).startswith(":2: trials: none")
    path.write_bytes(gzip.compress(b""))
    with pytest.raises(ValueError, match=r":1: header: '': expected a JSON object"):
        read(path)


def test_a_file_that_is_no_gzip_is_one_line(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"cannot read .*fake.csv.gz"):
        read(path)


def test_a_gzip_of_three_megabytes_takes_no_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / f"bomb{SUFFIX}"
    once = gzip.compress(b"\0" * (10 << 20), 9)
    path.write_bytes(once * 290)  # 2.9 MB, 2.9 GB of text
    script = "import resource, sys; from pathlib import Path; from kerneltune.search import trial_table\n"
    script += "limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    script += "try:\n    trial_table.read(Path(sys.argv[1]))\nexcept ValueError as error:\n    print(error)\n"
    script += "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - limit) >> 10)"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, env=environment(), check=True
    )
    said, megabytes = done.stdout.splitlines()
    assert said == f"cannot read {path}: more than {64 << 20} bytes of text"
    assert int(megabytes) < 300
