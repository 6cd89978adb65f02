"""Journeys of programs that know nothing of kerneltune: capture, tune, serve."""

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from journey import ROOT, Place, journey, json_lines, require


def capture(place: Place, *program: str | Path, options: Sequence[str] = ()) -> str:
    """Capture a program, list and check its launches; return the program's output."""
    out = place.kerneltune("capture", "--out", "cap", *options, "--", sys.executable, *program).stdout
    listed = place.kerneltune("adopt", "list", "cap").stdout
    require("classes" in listed, "no table of kernels")
    place.kerneltune("sweep", "cap", "--check-only", "--results", "checked")
    return out


def tune(place: Place, *options: str, classes: int = 0) -> None:
    """Tune the capture: so many classes, if told, and none is skipped then."""
    done = place.kerneltune("tune", "cap", *options)
    summary = re.search(r"(\d+) class(?:es)? tuned in", " ".join(done.stdout.split()))
    require(summary is not None, "no summary")
    assert summary is not None
    if classes:
        require(int(summary[1]) == classes, f"tuned {summary[1]} of {classes} classes")
        require(re.search("^skipped:", done.stderr, re.MULTILINE) is None, "a class was skipped")
    require((place.folder / "cap" / "served" / f"{place.gpu['slug']}.json").is_file(), "no table for this GPU")


def serve(place: Place, *program: str | Path, miss: str = "error") -> list[dict[str, object]]:
    """Serve a program with an empty cache of Triton's; return the lines that its processes print. Nothing may be timed."""
    cache = place.folder / f"served-{len(list(place.folder.glob('served-*')))}"
    done = place.kerneltune(
        "serve", "--configs", "cap", "--miss", miss, "--", sys.executable, *program, env={"TRITON_CACHE_DIR": str(cache)}
    )
    rows = json_lines(done.stdout)
    require(bool(rows), "the program printed no line")
    for row in rows:
        require(row["timed"] == 0, f"{row['timed']} timings at run time")
        require(row["served"] is not None, "nothing was served")
    return rows


@journey(limit_s=300)
def adopt_package(place: Place) -> None:
    """Serve a package in site-packages: the same results, nothing timed, launches that were not tuned recorded."""
    place.bring("packages", "use_foreign.py", "observed.py")
    (plain,) = json_lines(place.python("use_foreign.py", "1000", "4096").stdout)
    require(plain["timed"] > 0, "the author's autotuner timed nothing, so there is nothing to show")
    (captured,) = json_lines(capture(place, "use_foreign.py", "1000", "4096"))
    require((captured["digest"], captured["timed"]) == (plain["digest"], 0), "capturing changes results, or times configs")
    tune(place, classes=4)
    (served,) = serve(place, "use_foreign.py", "1000", "4096")
    require(served["digest"] == plain["digest"], "served results differ")
    counts: Any = served["served"]
    require(counts["hits"] > 0 and counts["misses"] == counts["tunings"] == 0, f"serving counted {counts}")
    (other,) = serve(place, "use_foreign.py", "1000", "2048", miss="nearest")
    missed = place.kerneltune("adopt", "list", "cap/misses").stdout
    require("scaled_sum_kernel" in missed, "a launch that was not tuned is not recorded")
    counts = other["served"]
    require(counts["misses"] >= 1 and counts["tunings"] == 0, f"serving counted {counts}")
    tune(place)
    serve(place, "use_foreign.py", "1000", "2048")


@journey(limit_s=240)
def adopt_script(place: Place) -> None:
    """Serve a script without a `__main__` guard, whose kernel reads a global that depends on arguments and a variable."""
    place.bring("script.py", "observed.py")
    os.environ["SCRIPT_STEP"] = "3"
    (plain,) = json_lines(place.python("script.py", "100", "1000").stdout)
    capture(place, "script.py", "100", "1000")
    tune(place, classes=2)
    (served,) = serve(place, "script.py", "100", "1000")
    require(served["digest"] == plain["digest"], "served results differ")


@journey(limit_s=240)
def adopt_two_processes(place: Place) -> None:
    """Serve two processes at once: they choose the same configs."""
    place.bring("packages", "two_processes.py", "observed.py")
    capture(place, "two_processes.py", "1000", "4096")
    tune(place, classes=2)
    first, second = serve(place, "two_processes.py", "1000", "4096")
    require(first["configs"] == second["configs"], f"{first['configs']} and {second['configs']} differ")
    require(first["digest"] == second["digest"], "results differ")
    require(bool(first["configs"]), "no kernel was launched")


@journey(limit_s=240)
def adopt_plain(place: Place) -> None:
    """Serve a script of kernels without an autotuner: blocks of grids and loops are tuned, a block of the host is not."""
    place.bring("plain.py", "observed.py")
    (plain,) = json_lines(place.python("plain.py", "1000", "4096").stdout)
    capture(place, "plain.py", "1000", "4096", options=("--plain",))
    tune(place, classes=6)
    verdicts = json.loads((place.folder / "cap" / "blocks.json").read_text())["classes"].values()
    kept = [one["BLOCK"] for one in verdicts if one["BLOCK"]]
    require((len(kept), len(verdicts)) == (2, 6), f"verdicts of blocks: {list(verdicts)}")
    (served,) = serve(place, "plain.py", "1000", "4096")
    require(served["digest"] == plain["digest"], "served results differ")


@journey(limit_s=320, packages=("fla", "einops"))
def adopt_fla(place: Place) -> None:
    """Serve a layer of flash-linear-attention, forward and backward."""
    program = _example("gla_layer.py")
    out = place.kerneltune("capture", "--out", "cap", "--", sys.executable, program, "captured", "captured.pt")
    require(len(json_lines(out.stdout)) == 1, "the captured program printed no line")
    tune(place, "--share", "0.6", "--budget", "40")
    command = ["serve", "--configs", "cap", "--miss", "default", "--", sys.executable, program, "served", "s.pt", "captured.pt"]
    (row,) = json_lines(place.kerneltune(*command).stdout)
    require(row["serving"]["hits"] > 0 and row["serving"]["tunings"] == 0, f"serving counted {row['serving']}")
    require(row["largest_difference"] < 0.05, f"results differ by {row['largest_difference']}")


@journey(limit_s=240, packages=("liger_kernel",))
def adopt_liger(place: Place) -> None:
    """Serve a kernel of liger-kernel at two sizes, forward and backward."""
    _part(place, "dynamic_tanh", "1024", "8192")


@journey(limit_s=240, packages=("torchao",))
def adopt_torchao(place: Place) -> None:
    """Serve casts of torchao."""
    _part(place, "rowwise", "1024")


def _part(place: Place, name: str, *sizes: str) -> None:
    place.bring("one_part.py", "observed.py")
    _example("liger_torchao.py")
    place.kerneltune("capture", "--out", "cap", "--", sys.executable, "one_part.py", name, *sizes)
    tune(place, "--budget", "40")
    serve(place, "one_part.py", name, *sizes, miss="default")


def _example(name: str) -> Path:
    """Return a program of examples/adopted_packages, whose folder is on the path from now on."""
    folder = ROOT / "examples" / "adopted_packages"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return folder / name
