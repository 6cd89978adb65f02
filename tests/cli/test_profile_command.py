"""Test profile: refused arguments, and values of A beside those of B."""

import json
from pathlib import Path

import pytest
from command_line import refused, run

from kerneltune import device
from kerneltune.cli import profile
from kerneltune.inspection import ncu
from kerneltune.spec import Variant

CONFIG = json.dumps({"rows": 1, "cols": 4096, "split": False, "warps": 8, "ctas": 0, "stages": 1, "reload": False})


def test_profile_without_gpu_case_variant_or_package_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: device.NO_GPU)
    monkeypatch.setattr(Variant, "missing", lambda variant: ("quack",) if variant.name == "quack" else ())
    pair = ("profile", "rmsnorm_fwd", "baseline", "optimized")
    assert refused(*pair).startswith("error: profile needs an NVIDIA GPU; ")
    assert refused(*pair, "--case", "x").startswith("error: case: 'x': expected one of te-29x17389, ")
    assert refused(*pair[:3], "fast").startswith("error: variant: 'fast': expected one of baseline, ")
    assert refused(*pair[:3], "quack") == "error: quack needs quack, which is not installed"
    assert refused(*pair, "--config-b", "{}").startswith("error: config of optimized: expected the knobs [")
    assert refused(*pair, "--quant", "int4").endswith(
        "no sweep has a bench case of rmsnorm_fwd with dtype=None quant='int4': see `ops rmsnorm_fwd`"
    )


@pytest.mark.usefixtures("an_h200")
def test_profile_without_ncu_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "find_ncu", lambda: None)
    assert refused("profile", "rmsnorm_fwd", "baseline", "optimized").startswith(
        "error: profile needs Nsight Compute: no ncu on PATH"
    )


@pytest.mark.usefixtures("an_h200")
def test_profile_prints_values_of_a_beside_b(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def fake(_ncu: Path, command: list[str], _folder: Path) -> ncu.NcuReport:
        commands.append(command[-5:])
        values = {"DRAM % of peak": 40.0 + len(commands), "shared bank conflicts": 1048576.0}
        lines = [
            ncu.ConflictLine("kernels.py:241", "words = tl.trans(q)", 12288),
        ]
        profiled = ncu.Profile("_k", 34.8, values, "registers", (("long scoreboard", 17.25), ("barrier", 3.5)))
        return ncu.NcuReport([profiled], lines if len(commands) == 1 else [])

    monkeypatch.setattr(profile, "find_ncu", lambda: Path("/ncu"))
    monkeypatch.setattr(profile, "profile", fake)
    result = run("profile", "rmsnorm_fwd", "baseline", "optimized", "--case", "te-8192x4096", "--config-b", CONFIG)
    assert result.exit_code == 0, result.output
    words = [line.split() for line in result.stdout.splitlines()]
    assert ["DRAM", "%", "of", "peak", "41", "42"] in words
    assert ["shared", "bank", "conflicts", "1,048,576", "1,048,576"] in words
    assert ["stall", "1", "long", "scoreboard", "17.25", "long", "scoreboard", "17.25"] in words
    assert ["kernels.py:241", "12,288", "words", "=", "tl.trans(q)"] in words
    assert ["B", "optimized:", "no", "line", "has", "bank", "conflicts"] in words
    assert [line[0] for line in words if line and line[0].startswith("kernels.py:")] == ["kernels.py:241"]
    assert [command[:3] for command in commands] == [["", "rmsnorm_fwd", name] for name in ("baseline", "optimized")]
    assert json.loads(commands[0][3])["axes"] == [["M", 8192], ["N", 4096]]
    assert commands[1][4] == CONFIG
