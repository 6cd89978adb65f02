"""The order of a look-up: own entry, near entry, default; and the entries that serve a GPU without configs."""

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import run
from typing import Any, NamedTuple

import pytest
from fake_tuner import CASE, SMALL, Small, op_of

from kerneltune import cache, device
from kerneltune.device import Device
from kerneltune.misses import CacheMissWarning
from kerneltune.spec import Case, Op

pytestmark = pytest.mark.usefixtures("forgotten_configs")

GPU, H100 = "nvidia_h200", "nvidia_h100_80gb_hbm3"


class Found(NamedTuple):
    """An answer whose words are comparable."""

    config: Any
    source: str
    described: str


DEFAULT = Found(Small(256, 4), "default", "the default")
OP = replace(op_of(SMALL), free_axes=("M",))


def store(root: Path, size: int, block: int, gpu: str = GPU) -> None:
    values = {"variant": "optimized", "case": "a", "axes": {"M": size}, "dtype": "bfloat16", "quant": "none", "options": {},
              "policy": "cold", "config": {"block": block, "warps": 8}, "evidence": {}}  # fmt: skip
    cache.store(gpu, cache.entry_from(OP.name, values), root)


@functools.cache
def operator(max_distance: float) -> Op:
    return replace(OP, max_distance=max_distance)


def look_up(root: Path, size: int, gpu: str = GPU, max_distance: float = 4.0) -> Found:
    choice = cache.Chooser.of(operator(max_distance), SMALL, "cold", root).find(Case("", (("M", size),), "bfloat16"), gpu)
    return Found(choice.config, choice.source.name, choice.describe())


def test_look_up_returns_the_exact_entry_else_a_near_one_else_the_default(tmp_path: Path) -> None:
    store(tmp_path, 1024, 512)
    store(tmp_path, 4096, 64)
    assert look_up(tmp_path, 4096) == Found(Small(64, 8), "own", "")
    near = 'that of M=4096 bfloat16, log2 distance 1.00: {"block": 64, "warps": 8}'
    assert look_up(tmp_path, 8192) == Found(Small(64, 8), "near", near)
    assert [look_up(tmp_path, size).source for size in (65536, 65537, 64, 63)] == ["near", "default", "near", "default"]
    assert look_up(tmp_path, 63) == DEFAULT
    assert [look_up(tmp_path, size, max_distance=0.5).source for size in (4096, 5792, 5793)] == ["own", "near", "default"]
    assert look_up(tmp_path, 4097, max_distance=0.0) == DEFAULT


def test_look_up_on_a_gpu_without_configs_returns_those_of_the_nearest_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "ARCHITECTURES", {**device.ARCHITECTURES, "amd_mi300x": "gfx942", "amd_mi250": "gfx90"})
    store(tmp_path, 1024, 512)
    store(tmp_path, 1024, 64, "nvidia_b200")
    store(tmp_path, 1024, 128, "an_unknown_gpu")
    with pytest.warns(UserWarning, match=f"no configs for {H100}: those of {GPU}, the nearest known architecture") as caught:
        choices = [look_up(tmp_path, size, H100) for size in (1024, 2048)]
    assert len(caught) == 1
    assert [(choice.config, choice.source) for choice in choices] == [(Small(512, 8), "near")] * 2
    assert choices[1].described.startswith(f"that of M=1024 bfloat16 on {GPU}, log2 distance 1.00: ")
    assert look_up(tmp_path, 1 << 20, H100) == DEFAULT
    for gpu in ("amd_mi300x", "a_gpu_of_no_known_architecture", device.INTERPRETER):
        assert look_up(tmp_path, 1024, gpu) == DEFAULT
    store(tmp_path, 1 << 20, 1024, H100)  # from its first own config on, other GPUs no longer serve it
    assert look_up(tmp_path, 1024, H100) == DEFAULT


def test_near_entries_of_a_gpu_without_configs_are_those_that_its_calls_use(tmp_path: Path) -> None:
    store(tmp_path, 1024, 512)
    chooser, case = cache.Chooser.of(OP, SMALL, "cold", tmp_path), Case("", (("M", 1024),), "bfloat16")
    assert [(match.config, match.distance) for match in chooser.matches(case, H100)] == [(Small(512, 8), 0.0)]
    assert chooser.own(case, H100) is None
    assert chooser.own(case, GPU) is not None


def test_call_on_a_gpu_without_configs_warns_of_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current", lambda: Device("NVIDIA H100 80GB HBM3", "sm_90", 132, 50 << 20, "580"))
    store(tmp_path, CASE["M"], 512)
    with pytest.warns(UserWarning) as caught:
        assert cache.Chooser.of(OP, SMALL, "cold", tmp_path)(CASE.axes, CASE.dtype, gpu=H100) == Small(512, 8)
    assert [one.category for one in caught] == [UserWarning, CacheMissWarning]
    assert f"on {GPU}" in str(caught[1].message)


@pytest.mark.filterwarnings("error")
def test_look_up_ignores_rules_files_of_older_versions(tmp_path: Path) -> None:
    store(tmp_path, 1024, 512)
    for gpu in (GPU, H100):
        rules = tmp_path / gpu / "rules" / "fake.json"
        rules.parent.mkdir(parents=True)
        rules.write_text("{")
    assert look_up(tmp_path, 1024).source == "own"
    assert look_up(tmp_path, 1 << 20) == DEFAULT
    assert cache.load("fake", GPU, tmp_path)


@pytest.mark.parametrize("config", [{"block": float("nan"), "warps": 4}, {"block": 0, "warps": 4}, {"block": -16, "warps": 4},
                                    {"block": 64, "warps": -1}, {"block": 10**400, "warps": 4}, {"block": 48, "warps": 4},
                                    {"block": True, "warps": 4}, {"block": None, "warps": 4}])  # fmt: skip
def test_look_up_of_an_entry_with_unusable_knobs_warns_once_and_returns_the_default(
    config: dict[str, Any], tmp_path: Path
) -> None:
    good = {"variant": "optimized", "case": "good", "axes": {"M": 64}, "dtype": "bfloat16", "quant": "none", "options": {},
            "policy": "cold", "config": {"block": 128, "warps": 8}, "evidence": {}}  # fmt: skip
    bad = {**good, "case": "bad", "axes": dict(CASE.axes), "config": config}
    path = cache.path_of("fake", GPU, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"schema": 1, "op": "fake", "device": GPU, "entries": [bad, good]}))
    with pytest.warns(UserWarning) as caught:
        assert look_up(tmp_path, CASE["M"], max_distance=0.0) == DEFAULT
        assert look_up(tmp_path, 64, max_distance=0.0).config == Small(128, 8)  # one bad entry breaks no other look-up
    ours = [str(one.message) for one in caught if "not used" in str(one.message)]
    assert len(ours) == 1
    assert str(path) in ours[0]
    assert "\n" not in ours[0]
    assert "entries[0]" in ours[0] or "optimized bad" in ours[0]


def test_look_up_imports_neither_numpy_nor_torch() -> None:
    code = (
        "import sys; from kerneltune import cache, spec; "
        "variant = spec.Variant('optimized', dict, dict, default=lambda _: {}); "
        "op = spec.Op('rmsnorm_fwd', ('M', 'N'), (), dict, dict, list, dict, (variant,), 'none'); "
        "cache.Chooser.of(op, variant).find("
        "spec.Case('', (('M', 8), ('N', 8)), 'bfloat16'), 'nvidia_h200'); "
        "assert not {'numpy', 'pandas', 'sklearn', 'optuna', 'torch', 'scipy'} & set(sys.modules), sorted(sys.modules)"
    )
    assert run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode == 0
