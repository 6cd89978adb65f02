"""Measured spaces as files: what is written comes back, and what is wrong with a broken file."""

import gzip
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import landscapes
import pytest
from started import environment

from kerneltune.search import spaces

SPACE = landscapes.space(0)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return spaces.write(tmp_path / "none" / "spaces", SPACE)


def test_a_space_comes_back_as_it_was_written(written: Path) -> None:
    again = spaces.read(written)
    assert list(again.trials) == list(SPACE.trials)
    assert again.default == SPACE.default
    assert again.axes == SPACE.axes
    for knobs, trial in SPACE.trials.items():
        read = again.trials[knobs]
        assert (read.status, read.resources, read.spill_bytes) == (trial.status, trial.resources, trial.spill_bytes)
        assert read.time_us == (None if trial.time_us is None else pytest.approx(trial.time_us, rel=1e-5))
    assert written.name == "made_up_optimized_made_up_0_bfloat16_none_cold.csv.gz"


def test_the_same_space_gives_the_same_bytes(written: Path, tmp_path: Path) -> None:
    assert spaces.write(tmp_path / "again", spaces.read(written)).read_bytes() == written.read_bytes()
    assert not list(written.parent.glob(".*"))


def broken(change: Callable[[str], str], path: Path) -> str:
    """Return what reading says of a file whose text is changed."""
    path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()).decode()).encode()))
    with pytest.raises(ValueError) as caught:
        spaces.read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"schema": 1', '"schema": 2', ":1: header: schema: 2: expected 1"),
        ('"op": "made_up", ', "", ":1: header: op: missing"),
        ("# {", "# [", ":1: header: '# ["),
        ('"axes": {', '"axes": 5, "x": {', ":1: header: axes: 5: expected object"),
        ('"knobs": {"rows"', '"knobs": {"class"', ":1: header: knobs: 'class': expected the name of a knob"),
        (
            '"default": {"rows"',
            '"default": {"x"',
            ":1: header: default: 'x, cols, warps, ctas, stages, reload': expected a value of rows, cols",
        ),
        ('"axes": {', '"axes": ' + "[" * 100_000, ":1: header: "),
        (
            "\n1,256,1,0,1,False,ok",
            '\n"' + "1" * 200_000 + '",256,1,0,1,False,ok',
            ":3: not a trial: field larger than field limit",
        ),
        ("\n1,256,1,0,1,False,ok", f"\n{'1' * 5000},256,1,0,1,False,ok", ":3: not a trial: '1111"),
        ("rows,cols,warps", "rows,columns,warps", ":2: columns: 'rows,columns,warps,ctas,stages,reload,status"),
        ("\n1,256,1,0,1,False,ok", "\n1,256,1,0,1,maybe,ok", ":3: not a trial: '1,256,1,0,1,maybe,ok,"),
        ("\n1,256,1,0,1,False,ok", "\n1,256,1,0,1,False,spills", ":3: not a trial: '1,256,1,0,1,False,spills,"),
        ("\n1,256,1,0,1,False,ok,", "\n1,256,1,0,1,False,ok,-", ":3: not a trial: '1,256,1,0,1,False,ok,-"),
    ],
)
def test_a_broken_space_is_named_with_its_line(old: str, new: str, message: str, written: Path) -> None:
    assert broken(lambda text: text.replace(old, new, 1), written).startswith(message)


def test_what_is_no_gzip_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    path.write_text("hello")
    with pytest.raises(ValueError, match=r"cannot read .*x.csv.gz"):
        spaces.read(path)


def test_a_gzip_of_three_megabytes_takes_no_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "bomb.csv.gz"
    once = gzip.compress(b"\0" * (10 << 20), 9)
    path.write_bytes(once * 290)  # 2.9 MB, 2.9 GB of text
    script = "import resource, sys; from pathlib import Path; from kerneltune.search import spaces\n"
    script += "limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
    script += "try:\n    spaces.read(Path(sys.argv[1]))\nexcept ValueError as error:\n    print(error)\n"
    script += "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - limit) >> 10)"
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, env=environment(), check=True
    )
    said, megabytes = done.stdout.splitlines()
    assert said == f"cannot read {path}: more than {64 << 20} bytes of text"
    assert int(megabytes) < 300
