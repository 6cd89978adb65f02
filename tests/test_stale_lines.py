"""Lines about records of other code or configs: a record with the config at hand is fresh, whatever its variant and GPU."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from literal_records import entry_record, h200_entries, literal

from kerneltune import cache, ops
from kerneltune.records import Record
from kerneltune.spec import Case, Op
from kerneltune.stale import stale_lines
from kerneltune.task import Task, knobs_of

OPS = ops.load()
OTHER_WARPS = 8


def with_config(config: dict[str, Any] | None, **changes: Any) -> Record:
    return entry_record(h200_entries()[0], config=config, **changes)


def at_hand(op: Op, entry: cache.CacheEntry, policy: str, gpu: str) -> dict[str, Any] | None:
    """Return the config that a measurement of an entry's case has on a GPU."""
    return knobs_of(Task(op, entry.case, op.variant(entry.variant), policy).config_of_call(gpu))


def test_record_of_another_config_is_named_with_the_knobs_that_differ() -> None:
    entry = h200_entries()[0]
    (line,) = stale_lines([with_config(entry.config | {"warps": OTHER_WARPS})], OPS)
    assert line == (
        "rmsnorm_fwd optimized: 1 of 1 row measured with another config: "
        f"{entry.case.name} {entry.case.dtype} {entry.case.quant} (warps=8, here warps={entry.config['warps']}): measure again"
    )
    variants = [with_config({"warps": 1}, op="mine", options={"mode": mode}) for mode in ("a", "b")]
    op = dataclasses.replace(OPS["rmsnorm_fwd"], name="mine", options={"mode": ("a", "b")})
    (line,) = stale_lines(variants, {"mine": op})
    assert f": {entry.case.name} {entry.case.dtype} {entry.case.quant} (" in line
    assert f"), {entry.case.name} mode=b {entry.case.dtype} {entry.case.quant} (" in line
    (line,) = stale_lines(
        [*variants, with_config({"warps": 2}, op="mine", options={"mode": "b"}, axes={"M": 1, "N": 8})], {"mine": op}
    )
    assert line.endswith(") and 1 more: measure again")
    (line,) = stale_lines([with_config(None)], OPS)
    assert "(none, here rows=" in line


def test_record_from_before_a_knob_has_the_default_of_the_knob() -> None:
    op = OPS["int4_fp8_grouped_gemm"]
    entries = {entry.config["maxnreg"]: entry for entry in cache.load_strict(cache.path_of(op.name, "nvidia_h200"))}
    lines = {}
    for maxnreg in (0, 128):
        key, config = entries[maxnreg].key, {name: value for name, value in entries[maxnreg].config.items() if name != "maxnreg"}
        row = literal(100.0, **key.fields | {"op": op.name, "config": config, "source_hash": op.variant(key.variant).source_hash})
        lines[maxnreg] = stale_lines([row], OPS)
    assert lines[0] == []
    assert "(maxnreg=0, here maxnreg=128)" in lines[128][0]


def test_records_of_a_variant_that_was_renamed_are_stale() -> None:
    op = OPS["rmsnorm_fwd"]
    renamed = tuple(dataclasses.replace(each, name="tiled") if each.name == "optimized" else each for each in op.variants)
    (line,) = stale_lines([entry_record(h200_entries()[0])], {"rmsnorm_fwd": dataclasses.replace(op, variants=renamed)})
    assert line == "rmsnorm_fwd optimized: 1 row of no variant here: measure again"


def test_records_of_the_cached_configs_are_fresh_in_any_order_of_axes_and_options() -> None:
    rows = [entry_record(entry) for entry in h200_entries()]
    reordered = [
        entry_record(entry, axes=dict(reversed(entry.case.axes)), options=dict(reversed(entry.case.options)))
        for entry in h200_entries()
    ]
    assert len(rows) > 10
    assert stale_lines(rows, OPS) == stale_lines(reordered, OPS) == []


def test_cached_config_that_became_another_makes_its_record_stale(tmp_path: Path) -> None:
    entry = h200_entries()[0]
    row = entry_record(entry)
    assert stale_lines([row], OPS) == []
    cache.use_root(tmp_path)
    cache.store("nvidia_h200", dataclasses.replace(entry, config=entry.config | {"warps": OTHER_WARPS}))
    (line,) = stale_lines([row], OPS)
    assert f"(warps={entry.config['warps']}, here warps={OTHER_WARPS})" in line


def test_default_that_changed_makes_a_record_without_a_cached_config_stale(tmp_path: Path) -> None:
    cache.use_root(tmp_path)
    op = OPS["stream"]
    (variant,) = op.variants
    case = Case("small", (("read", 1 << 20), ("write", 1 << 20)), "int32")
    default = knobs_of(variant.default_config(case))
    row = literal(
        10.0, op="stream", variant=variant.name, case="small", dtype="int32", quant="none", axes=dict(case.axes), options={},
        source_hash=variant.source_hash, config=default,
    )  # fmt: skip
    assert stale_lines([row], {"stream": op}) == []
    slow = dataclasses.replace(variant, default=lambda case: dataclasses.replace(variant.default_config(case), block=2048))
    (line,) = stale_lines([row], {"stream": dataclasses.replace(op, variants=(slow,))})
    assert "1 of 1 row measured with another config: small int32 none (" in line
    assert "(block=1024, here block=2048)" in line


def test_peers_untimed_rows_and_variants_without_knobs_are_never_stale_by_config() -> None:
    other = h200_entries()[0].config | {"warps": OTHER_WARPS}
    untimed = dict.fromkeys(("time_us", "gbps", "ci_low_us", "ci_high_us", "n"))
    assert stale_lines([with_config(other, role="peer", variant="of_another_package")], OPS) == []
    assert len(stale_lines([with_config(other, role="peer")], OPS)) == 1  # an own variant, whatever its record says
    assert stale_lines([with_config(other, status="skipped", reason="no memory", **untimed)], OPS) == []
    plain = dataclasses.replace(OPS["rmsnorm_fwd"].variant("optimized"), config=None, default=None)
    bare = dataclasses.replace(OPS["rmsnorm_fwd"], variants=(plain,))
    assert stale_lines([with_config(None, source_hash=plain.source_hash)], {"rmsnorm_fwd": bare}) == []


@pytest.mark.parametrize("policy", ["hot", "eager"])
def test_record_of_another_policy_is_compared_with_the_config_of_that_policy(policy: str) -> None:
    entry = h200_entries()[0]
    config = at_hand(OPS["rmsnorm_fwd"], entry, policy, "nvidia_h200")
    assert stale_lines([entry_record(entry, policy=policy, config=config)], OPS) == []


@pytest.mark.filterwarnings("ignore:no configs for")
def test_record_of_a_gpu_without_configs_is_compared_with_the_configs_that_serve_it() -> None:
    entry = h200_entries()[0]
    borrowed = at_hand(OPS["rmsnorm_fwd"], entry, "cold", "nvidia_b200")
    assert stale_lines([entry_record(entry, device="NVIDIA B200", config=borrowed)], OPS) == []
    assert len(stale_lines([with_config({"warps": 1}, device="NVIDIA B200")], OPS)) == 1
    assert stale_lines([with_config({"warps": 1}, device="A GPU Nobody Knows")], OPS) == []


def test_record_of_a_plug_in_or_capture_is_compared_by_the_case_looked_up(tmp_path: Path) -> None:
    """A capture gives many classes of launches one config: `as_called` returns the case of the config."""
    first, second = h200_entries()[:2]
    op = dataclasses.replace(OPS["rmsnorm_fwd"], name="mine", as_called=lambda _case: first.case)
    cache.use_root(tmp_path)
    cache.store("nvidia_h200", dataclasses.replace(first, op="mine"))
    rows = [entry_record(second, op="mine", config=config) for config in (first.config, {"warps": 1})]
    assert stale_lines(rows[:1], {"mine": op}) == []
    assert len(stale_lines(rows[1:], {"mine": op})) == 1


def test_record_of_axes_that_the_operator_lacks_is_of_other_code() -> None:
    (line,) = stale_lines([with_config(None, axes={"M": 8})], OPS)
    assert line.startswith("rmsnorm_fwd optimized: 1 of 1 row measured with other code: ")
