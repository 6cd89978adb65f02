"""A record written out, for tests of tables, gate and pages."""

from typing import Any

import msgspec
from msgspec.structs import replace

from kerneltune import cache, ops
from kerneltune.cache import CacheEntry
from kerneltune.files import decode
from kerneltune.records import Record

NO_TIMES = dict.fromkeys(["time_us", "gbps", "pct_ceiling", "ci_low_us", "ci_high_us", "n", "aa_floor"])


def literal(us: float, **changes: Any) -> Record:
    """Make a record of RMSNorm that took `us`, except changed fields."""
    values: dict[str, Any] = {
        "op": "rmsnorm_fwd",
        "variant": "baseline",
        "case": "te-8192x4096",
        "dtype": "bfloat16",
        "quant": "fp8",
        "policy": "cold",
        "status": "passed",
        "time_us": us,
        "gbps": 1000.0,
        "ci_low_us": us,
        "ci_high_us": us,
        "n": 10,
        "device": "NVIDIA H200",
        "driver": "570",
        "torch": "2.9",
        "triton": "3.5",
        "source_hash": "0",
        "commit": "0",
        "date": "2026-11-21T06:00:00Z",
        "axes": {"M": 8192, "N": 4096},
    }
    if "time_us" in changes:
        values |= {"ci_low_us": changes["time_us"], "ci_high_us": changes["time_us"]}
    return Record(**{**values, **changes})


def changed(record: Record, **changes: Any) -> Record:
    """Copy a record with changed fields; another time has an interval of its own."""
    if changes.get("time_us") is not None:
        changes = {"ci_low_us": changes["time_us"], "ci_high_us": changes["time_us"]} | changes
    return replace(record, **changes)


def to_json(record: Record) -> str:
    """Return the line of a record, as `records.append` writes it."""
    return msgspec.json.encode(record, enc_hook=list).decode()


def from_json(text: str) -> Record:
    """Return the record on a line, as `records.load` reads it."""
    return decode(text, Record)


def h200_entries(variant: str = "optimized") -> list[CacheEntry]:
    """Return the configs of rmsnorm_fwd that are shipped for the H200."""
    entries = cache.load_strict(cache.path_of("rmsnorm_fwd", "nvidia_h200"))
    return [entry for entry in entries if entry.variant == variant and entry.policy == "cold"]


def entry_record(entry: CacheEntry, **changes: Any) -> Record:
    """Make a record of a config of rmsnorm_fwd, measured with the present code."""
    values = entry.key.fields | {"config": entry.config}
    code = ops.load()["rmsnorm_fwd"].variant(entry.variant).source_hash
    return literal(100.0, **values | {"source_hash": code} | changes)
