"""Test the command cache on stored entries and on broken entries."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import operators, refused, run

from kerneltune.sweep_file import OR_OP
from kerneltune.wording import first_of


@pytest.fixture
def stored(configs_dir: Path) -> Path:
    """Make a cache with a good entry: the baseline's first config."""
    from kerneltune import cache, ops
    from kerneltune.spec import Case

    case = Case("te", (("M", 8192), ("N", 4096)), "bfloat16", "none", (("zero_centered", False),))
    config = ops.load()["rmsnorm_bwd"].variant("baseline").default_config(case)
    entry = cache.CacheEntry(
        op="rmsnorm_bwd",
        variant="baseline",
        case=case,
        policy="cold",
        config={field: getattr(config, field) for field in config.__dataclass_fields__},
        evidence={"speedup": 1.25, "date": "2026-11-21T06:00:00Z"},
    )
    return cache.store("nvidia_h200", entry)


def change(path: Path, **fields: Any) -> None:
    """Change fields of the only entry of a cache file."""
    data = json.loads(path.read_text())
    data["entries"][0].update(fields)
    path.write_text(json.dumps(data))


def test_cache_list_and_show_print_stored_entries(stored: Path) -> None:
    listed = run("cache", "list").stdout.splitlines()
    assert [line.split() for line in listed] == [
        ["gpu", "op", "entries", "variants", "latest"],
        ["nvidia_h200", "rmsnorm_bwd", "1", "baseline", "2026-11-21"],
    ]
    shown = run("cache", "show", "rmsnorm_bwd")
    assert shown.exit_code == 0
    assert "1.25x" in shown.stdout
    assert "baseline" in shown.stdout
    fits = ("--case", "t*", "--dtype", "bfloat16", "--quant", "none", "--variant", "baseline")
    assert run("cache", "show", "rmsnorm_bwd", *fits).stdout == shown.stdout
    assert run("cache", "show", "rmsnorm_bwd", *fits[:-1], "base*").stdout == shown.stdout
    assert run("cache", "check").stdout.split() == f"good: 1 entry in 1 file of {stored.parent.parent}".split()


def test_cache_check_lists_configs_slower_than_their_default(stored: Path) -> None:
    change(stored, evidence={"over_default": [0.99, 1.01]})
    tied = run("cache", "check")
    assert tied.exit_code == 0
    assert tied.stdout.splitlines()[-1:] == ["1 were timed in the same rounds as their default: 0 slower than it"]
    change(stored, evidence={"over_default": [0.91, 0.95]})
    slower = run("cache", "check")
    assert slower.exit_code == 1
    _, _, listed = " ".join(slower.stdout.split()).partition(" 1 slower than it ")
    assert listed.startswith("rmsnorm_bwd baseline ")
    assert listed.endswith(": 0.910 to 0.950 of its default's speed")


def test_cache_check_in_a_folder_without_configs_says_that_none_is_yours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERNELTUNE_CONFIGS", raising=False)
    monkeypatch.chdir(tmp_path)
    where = f"none of them is yours: no file in {tmp_path}/configs, where `tune` and `cache import` store configs"
    assert where in " ".join(run("cache", "check").stdout.split())


def test_cache_check_of_an_empty_or_missing_folder_fails(configs_dir: Path) -> None:
    """Neither may pass: a gate of somebody's CI may name a missing folder by mistake."""
    assert run("cache", "list").stdout == f"no entries in {configs_dir}\n"
    commands: list[list[str]] = [["check"], ["show", "rmsnorm_fwd"]]
    for command in commands:
        assert refused("cache", *command, "--configs", configs_dir) == f"error: no cached configs in {configs_dir}"
        assert refused("cache", *command, "--configs", configs_dir / "no").endswith("/no': no such folder")


def test_cache_check_of_files_without_entries_fails(stored: Path) -> None:
    stored.write_text(json.dumps({**json.loads(stored.read_text()), "entries": []}))
    assert refused("cache", "check") == f"error: no cached configs in 1 file of {stored.parents[1]}"


@pytest.mark.parametrize("command", [("show", "rmsnorm_fwd"), ("export", "rmsnorm_fwd", "files")])
def test_cache_of_an_operator_without_configs_names_the_command_that_tunes_it(
    command: tuple[str, ...], stored: Path, configs_dir: Path
) -> None:
    assert stored.is_file()
    advice = "`kerneltune tune rmsnorm --op rmsnorm_fwd` finds them"
    message = f"error: op: 'rmsnorm_fwd': no cached configs in {configs_dir}: {advice}"
    assert refused("cache", *command, "--configs", configs_dir) == message


def test_cache_export_of_an_operator_without_knobs_says_that_it_has_no_configs() -> None:
    message = "error: op: 'moe_sort': expected an operator with configs: no variant of moe_sort has knobs"
    assert refused("cache", "export", "moe_sort", "files") == message


def test_cache_show_of_unknown_names_fails_with_known_names(stored: Path) -> None:
    assert stored.is_file()
    assert refused("cache", "show", "softmax") == f"error: op with cached configs: 'softmax': expected one of rmsnorm_bwd{OR_OP}"
    assert refused("cache", "show", "rmsnorm_bwd", "--gpu", "b200") == "error: gpu: 'b200': expected one of nvidia_h200"
    assert refused("cache", "show", "rmsnorm_bwd", "--dtype", "int8") == "error: dtype: 'int8': expected one of bfloat16"
    assert refused("cache", "show", "rmsnorm_bwd", "--case", "a*").startswith("error: case: 'a*': expected one of ")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"axes": {"M": -1, "N": 8}}, "axes: {'M': -1, 'N': 8}: expected int >= 0"),
        ({"variant": 3}, "variant: 3: expected str"),
        ({"speed": 3}, "speed: 3: expected no field of this name"),
        ({"variant": "fast"}, "rmsnorm_bwd: variant: 'fast': expected one of baseline, "),
        ({"config": {"speed": 3}}, "config of baseline: expected the knobs ["),
        ({"axes": {"Q": 4}}, "axes: Q: expected M, N"),
        ({"quant": "fp99"}, "quant: 'fp99': expected one of none"),
        ({"policy": "warm"}, "policy: 'warm': expected one of cold, hot, eager"),
        ({"options": {}}, "options: {}: expected a value for each of zero_centered"),
        ({"evidence": {"speedup": 10**400}}, "evidence.speedup: 1000"),
        ({"evidence": {"over_default": ["a", "b"]}}, "evidence.over_default[0]: 'a': expected float"),
    ],
)
def test_cache_check_names_field_and_value_of_a_broken_entry(fields: dict[str, Any], message: str, stored: Path) -> None:
    change(stored, **fields)
    assert refused("cache", "check").startswith(f"error: {stored}: entries[0]: {message}")


def test_cache_check_names_a_broken_file(stored: Path, configs_dir: Path) -> None:
    stranger = configs_dir / "nvidia_h200" / "softmax.json"
    stranger.write_text(stored.read_text().replace("rmsnorm_bwd", "softmax"))
    assert refused("cache", "check") == f"error: {stranger}: op: 'softmax': expected one of {first_of(operators(), 25)}{OR_OP}"
    stored.write_text(stored.read_text()[:-20])
    assert refused("cache", "check").startswith(f"error: {stored}:")


def test_cache_list_with_a_broken_file_warns(stored: Path) -> None:
    stored.write_text("{")
    with pytest.warns(UserWarning, match="JSON"):
        assert run("cache", "list").exit_code == 0


@pytest.mark.parametrize("value", [0, -16, -1, 10**400, 3, float("nan"), True, "8", None])
def test_cache_check_of_an_unusable_knob_fails(stored: Path, value: Any) -> None:
    knobs = json.loads(stored.read_text())["entries"][0]["config"]
    change(stored, config={**knobs, "warps": value})
    error = refused("cache", "check")
    assert error.startswith(f"error: {stored}: entries[0]: ")
    assert "warps" in error
    assert len(error) < 1000
