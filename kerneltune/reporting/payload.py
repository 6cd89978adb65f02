"""What the report page shows, as plain values: cases with their records, searches, the cache's evidence, training curves.

Pure functions; does not read files, know operators or lay anything out.
Imports the standard library, cache, cells, curves, device, errors, records, naming and tables.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kerneltune import cache
from kerneltune.cells import pairs
from kerneltune.curves import LAST, Curves, thinned
from kerneltune.device import INTERPRETER, PEAK_TFLOPS
from kerneltune.errors import unknown
from kerneltune.records import Key, Record, newest
from kerneltune.reporting.naming import CaseName, by_family, case_names, told_apart
from kerneltune.reporting.tables import INTERPRETER_NOTE, LOSS, WIN

MOST_EVALUATIONS = 25_000
"""Evaluations of searches that a page holds at most, so that it stays below 2 MB; the newest are kept."""
_FEW = 4
_COMMON = ("device", "driver", "torch", "triton", "commit")


@dataclass(frozen=True, slots=True)
class Sources:
    """Everything a page is made of.

    Attributes:
        records: of any number of files; the newest of each key, variant and device is shown.
        pair: the variants that are A and B at first.
        trials: rows of the trial stores, oldest first.
        entries: operator -> what the config cache holds for the device of the records.
        peers: (op, variant) that another package implements.
        flops: a record's key -> floating-point operations of one call, for operators that state them.
        command: the command line that made the page; files: where its data lies.
        curves: file -> the training curves in it.
    """

    records: Sequence[Record]
    pair: tuple[str, str]
    trials: Sequence[Mapping[str, Any]] = ()
    entries: Mapping[str, Sequence[cache.Entry]] = field(default_factory=dict)
    peers: frozenset[tuple[str, str]] = frozenset()
    flops: Mapping[Key, int] = field(default_factory=dict)
    command: str = ""
    files: Sequence[str] = ()
    curves: Mapping[str, Curves] = field(default_factory=dict)


def payload(sources: Sources) -> dict[str, Any]:
    """The page's data, ready for JSON.

    Raises:
        ValueError: no records and no curves.
    """
    records = newest(sources.records)
    if not records and not sources.curves:
        raise ValueError("no records to report")
    variants = sorted(dict.fromkeys(record.variant for record in records), key=lambda name: name != sources.pair[0])
    searches, left_out = _searches(sources.trials)
    return {
        "title": ", ".join(by_family(records)) or ", ".join(curves.title for curves in sources.curves.values()),
        "facts": _facts(records, sources),
        "remark": INTERPRETER_NOTE if any(record.device == INTERPRETER for record in records) else "",
        "variants": variants,
        "a": sources.pair[0],
        "b": sources.pair[1],
        "peers": sorted(f"{op} {variant}" for op, variant in sources.peers),
        "win": WIN,
        "loss": LOSS,
        "cases": _cases(records, sources),
        "searches": searches,
        "left_out": left_out,
        "evidence": _evidence(sources.entries, {record.op for record in records}),
        "curves": [_curves(file, curves) for file, curves in sources.curves.items()],
    }


def default_pair(
    records: Sequence[Record], peers: frozenset[tuple[str, str]] = frozenset(), a: str | None = None, b: str | None = None
) -> tuple[str, str]:
    """A and B as given, else `baseline` and `optimized`, else the first and the last variant that is no peer.

    Raises:
        ValueError: a variant that no record has.
    """
    variants = list(dict.fromkeys(record.variant for record in records))
    for side, name in (("a", a), ("b", b)):
        if name is not None and name not in variants:
            raise unknown(side, name, variants)
    own = list(dict.fromkeys(r.variant for r in records if (r.op, r.variant) not in peers)) or variants
    first = "baseline" if "baseline" in variants else own[0]
    last = "optimized" if "optimized" in variants else own[-1]
    return a or first, b or last


def _facts(records: Sequence[Record], sources: Sources) -> dict[str, str]:
    """What the header says, by name: of the records, else of the curves."""
    measured: Sequence[Record | Curves] = records or list(sources.curves.values())
    dates = sorted(one.date for one in measured)
    facts = {name: ", ".join(dict.fromkeys(getattr(one, name, "") for one in measured)) for name in _COMMON}
    days = list(dict.fromkeys((dates[0][:10], dates[-1][:10])))
    facts["measured"] = " to ".join(days)
    counts = {s: sum(r.status == s for r in records) for s in dict.fromkeys(r.status for r in records)}
    facts["records"] = ", ".join(f"{count} {status}" for status, count in counts.items())
    facts["files"] = ", ".join(sources.files)
    facts["command"] = sources.command
    return {name: value for name, value in facts.items() if value}


def _cases(records: Sequence[Record], sources: Sources) -> list[dict[str, Any]]:
    """One entry per key and device, its records by variant; the element type with the most records first."""
    cases: dict[object, dict[str, Any]] = {}
    for record, name in zip(records, case_names(records), strict=True):
        case = cases.get((record.key, record.device))
        if case is None:
            case = cases[record.key, record.device] = {
                **_named(name),
                "label": record.label,
                "policy": record.policy,
                "device": record.device,
                "bytes": None,
                "ceiling": None,
                "flops": sources.flops.get(record.key),
                "peak": PEAK_TFLOPS.get(record.device, {}).get(record.dtype),
                "of": {},
            }
        if record.time_us is not None and record.gbps is not None:
            case["bytes"] = case["bytes"] or round(record.gbps * record.time_us * 1e3)
            case["ceiling"] = case["ceiling"] or record.ceiling_gbps
        case["of"][record.variant] = _result(record)
    rows = Counter(record.dtype for record in records)
    return sorted(cases.values(), key=lambda case: -rows[case["dtype"]])


def _named(name: CaseName) -> dict[str, Any]:
    """What table and charts call a case; they choose among these and make up none."""
    return {
        "op": name.op,
        "kind": name.kind,
        "name": name.case,
        "dtype": name.dtype,
        "quant": name.quant,
        "axes": name.axes,
        "shape": name.shape,
        "options": name.settings,
        "title": name.title,
    }


def _result(record: Record) -> dict[str, Any]:
    if record.status != "passed":
        return {"status": record.status, "reason": " ".join(record.reason.split())}
    return {
        "status": "passed",
        "us": record.time_us,
        "low": record.ci_low_us,
        "high": record.ci_high_us,
        "gbps": record.gbps,
        "pct": record.pct_ceiling,
        "floor": record.aa_floor,
        "n": record.n,
        "config": record.config_label,
    }


def _searches(trials: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """The last search of every case, in the order of its evaluations, and how many evaluations did not find room."""
    groups: dict[object, list[Mapping[str, Any]]] = {}
    for trial in trials:
        key = tuple(_hashable(trial[name]) for name in ("op", "variant", "axes", "dtype", "quant", "options", "policy"))
        group = groups.setdefault(key, [])
        if group and group[-1]["fingerprint"] != trial["fingerprint"]:
            group.clear()  # another source, driver or compiler: its times do not belong to the same search
        group.append(trial)
    found: list[list[Mapping[str, Any]]] = []
    room, left_out = MOST_EVALUATIONS, 0
    for group in reversed(groups.values()):
        if sum(trial["time_us"] is not None for trial in group) < _FEW:
            continue
        if len(group) > room:
            left_out += len(group)
            continue
        room -= len(group)
        found.insert(0, group)
    names = told_apart(_trial_name(group[0]) for group in found)
    return [_search(name, group) for name, group in zip(names, found, strict=True)], left_out


def _trial_name(trial: Mapping[str, Any]) -> CaseName:
    options = {**trial["options"], "policy": trial["policy"]}
    return CaseName(trial["op"], trial.get("case", ""), trial["dtype"], trial["quant"], trial["axes"], options)


def _search(name: CaseName, group: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """evaluations: [time in µs or null, status, index of each knob's value]."""
    first = group[0]
    values = {knob: _ordered({trial["config"].get(knob) for trial in group}) for knob in first["config"]}
    evaluations = []
    for trial in group:
        time_us = trial["time_us"]
        knobs = [values[knob].index(trial["config"].get(knob)) for knob in values]
        evaluations.append([None if time_us is None else float(f"{time_us:.5g}"), trial["status"], *knobs])
    return {
        **_named(name),
        "variant": first["variant"],
        "knobs": {knob: [str(value) for value in found] for knob, found in values.items()},
        "evaluations": evaluations,
    }


def _evidence(entries: Mapping[str, Sequence[cache.Entry]], ops: set[str]) -> list[dict[str, Any]]:
    """What tuning gained over the default, case by case; cases of which both times are known."""
    timed = [
        (op, entry)
        for op, of_op in entries.items()
        for entry in (of_op if op in ops else ())
        if entry.evidence.get("time_us") and entry.evidence.get("default_us")
    ]
    names = told_apart(
        CaseName(op, e.case, e.dtype, e.quant, dict(e.axes), {**dict(e.options), "policy": e.policy}) for op, e in timed
    )
    return [
        {
            **_named(name),
            "variant": entry.variant,
            "us": entry.evidence["time_us"],
            "default_us": entry.evidence["default_us"],
            "trials": entry.evidence.get("trials"),
            "config": pairs(entry.config),
        }
        for name, (_, entry) in zip(names, timed, strict=True)
    ]


def _curves(file: str, curves: Curves) -> dict[str, Any]:
    """Curves with their final losses, of many steps with few points."""
    points, window = thinned(curves)
    return {
        "title": curves.title,
        "loss": curves.loss,
        "facts": {"device": curves.device, "torch": curves.torch, "date": curves.date, "command": curves.command, "file": file},
        "last": min(LAST, len(curves.steps)),
        "window": window,
        "steps": points.steps,
        "curves": [
            {
                "name": final.name,
                "final": final.loss,
                "difference": final.difference,
                "losses": [float(f"{loss:.6g}") for loss in losses],
            }
            for final, losses in zip(curves.finals, points.values.values(), strict=True)
        ],
    }


def _ordered(values: set[Any]) -> list[Any]:
    """Numbers by size, everything else by its text."""
    return sorted(values, key=lambda value: (isinstance(value, str), value if isinstance(value, int | float) else 0, str(value)))


def _hashable(value: Any) -> object:
    return tuple(value.items()) if isinstance(value, Mapping) else value
