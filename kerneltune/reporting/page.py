"""Write the report page: HTML with the data of families, of cases with their records, and of configs."""

import importlib.resources
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kerneltune import cache
from kerneltune.device import INTERPRETER
from kerneltune.records import RUN_FIELDS, Record, case_key, grouped, newest
from kerneltune.reporting import pairing, tables
from kerneltune.reporting.naming import CaseName, by_family, case_name, case_names, distinct_names, look, source_facts
from kerneltune.reporting.shares import bound_of, share
from kerneltune.table import Table
from kerneltune.wording import assignments

MOST_RECORDS = 6_000
"""The most records in a page, so that it stays below 3 MB."""
_FEW = 4
_SCRIPTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js", "figures.js", "charts.js", "table.js", "app.js")
_STATIC = ("title", "facts", "remark", "summary", "own")
"""Parts of the payload that the template writes, so that they need no script."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Hold the data of a page.

    Attributes:
        records: records of any number of files; the page shows the newest record of each key, variant and device.
        pair: the variants that are A and B at first, in the families that have them; None for the default.
        entries: the configs of the records' operators and devices in the config cache.
        command: the command line that made the page.
        files: the files of the records.
        own: family -> the tables that its workload declares.
    """

    records: Sequence[Record]
    pair: tuple[str | None, str | None] = (None, None)
    entries: Sequence[cache.CacheEntry] = ()
    command: str = ""
    files: Sequence[str] = ()
    own: Mapping[str, Sequence[Table]] = field(default_factory=dict)


def page(sources: Sources) -> str:
    """Return the page as HTML that needs no other file: the template with data, styles and scripts inlined."""
    import jinja2

    values = payload(sources)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    data = {name: value for name, value in values.items() if name not in _STATIC}
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return environment.from_string(_asset("page.html.j2")).render(
        {name: values[name] for name in _STATIC},
        style=_asset("style.css"),
        scripts=[_asset(name) for name in _SCRIPTS],
        data=text.replace("<", "\\u003c"),  # so that it cannot end the script element around it
    )


def _asset(name: str) -> str:
    return importlib.resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def payload(sources: Sources) -> dict[str, Any]:
    """Return the page's data, ready for JSON."""
    everything = newest(sources.records)
    if not everything:
        raise ValueError("no records to report")
    pairing.default_pair(everything, *sources.pair)
    records, remark = _shown(everything)
    families, whole = by_family(records), by_family(everything)
    pairs_of = pairing.family_pairs(families, sources.pair)
    variants = list(dict.fromkeys(record.variant for record in records))
    return {
        "title": ", ".join(families) if len(families) < _FEW else "kerneltune results",
        "facts": _facts(records, sources),
        "remark": remark,
        "summary": tables.families_table(whole, pairing.family_pairs(whole, sources.pair)).page() if len(whole) > 1 else None,
        "own": [(family, table.page()) for family in families for table in sources.own.get(family, ())],
        "families": [
            {
                "name": family,
                "a": pairs_of[family][0],
                "b": pairs_of[family][1],
                "sides": pairing.side_names(members),
                "columns": _measures(members),
            }
            for family, members in families.items()
        ],
        "variants": variants,
        "looks": {variant: look(variant) for variant in variants},
        "win": pairing.WIN,
        "loss": pairing.LOSS,
        "cases": [{**case, "family": family} for family, members in families.items() for case in _cases(members)],
        "evidence": _evidence(sources.entries, {record.op for record in records}),
    }


def _measures(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Return the columns of A's and B's measurements in a family's table."""
    columns = tables.ab_columns(bound_of(record) for record in records if record.time_us is not None)
    return [{"key": c.csv_name, "name": c.name, "digits": c.digits, "suffix": c.suffix} for c in columns]


def _without_paths(text: str) -> str:
    """Return the text with the names of files in place of their absolute paths, which are this machine's."""
    return _ABSOLUTE.sub(lambda path: path["name"], text)


_ABSOLUTE = re.compile(r"(?<![\w.:/<>-])(?:~|)/(?:[^\s/'\":,;()<>]+/)+(?P<name>[^\s/'\":,;()<>]*)")


def _shown(records: Sequence[Record]) -> tuple[list[Record], str]:
    """Return the records that a page has room for, case by case, and a remark about the records left out."""
    groups = list(grouped(records, case_key).values())
    num_shown = max(1, sum(count <= MOST_RECORDS for count in itertools.accumulate(map(len, groups))))
    shown, left_out = list(itertools.chain(*groups[:num_shown])), len(groups) - num_shown
    remarks = [tables.INTERPRETER_NOTE] if any(record.device == INTERPRETER for record in shown) else []
    if left_out:
        remarks.append(
            f"{left_out} of {len(groups)} cases are left out to keep this page small: --op, --dtype, --quant select other cases"
        )
    return shown, "; ".join(remarks)


def _facts(records: Sequence[Record], sources: Sources) -> dict[str, str]:
    """Return the facts of the header by name."""
    facts = source_facts(records, ", ")
    facts["records"] = tables.status_counts(r.status for r in records)
    facts["files"] = ", ".join(sources.files)
    facts["command"] = _without_paths(sources.command)
    return {name: value for name, value in facts.items() if value}


def _cases(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Make an entry per key and device with its records by variant; the element type with the most records comes first.

    Cases with equal operator, mode and options follow each other.
    """
    cases: dict[object, dict[str, Any]] = {}
    for record, name in zip(records, case_names(records), strict=True):
        case = cases.get(case_key(record))
        if case is None:
            case = cases[case_key(record)] = {
                **_named(name),
                "label": record.label,
                "policy": record.policy,
                "device": record.device,
                "bound": None,
                "best": None,
                "of": {},
            }
        if record.time_us is not None and record.gbps is not None:
            case["bound"] = case["bound"] or bound_of(record)
        case["of"][record.variant] = _result(record)
    for record in pairing.best_peers(records):
        case = cases[case_key(record)]
        case["best"] = {**_result(record), "is": record.variant}
    rows = Counter(record.dtype for record in records)
    orders = [(name, list(dict.fromkeys(case[name] for case in cases.values()))) for name in ("op", "quant", "settings")]
    return sorted(cases.values(), key=lambda case: (-rows[case["dtype"]], *(order.index(case[name]) for name, order in orders)))


def _named(name: CaseName) -> dict[str, Any]:
    """Return the names of a case, from which the table and the charts choose."""
    fields = ("op", "kind", "case", "dtype", "quant", "axes", "shape", "settings", "title")
    return {field: getattr(name, field) for field in fields}


def _result(record: Record) -> dict[str, Any]:
    if record.status != "passed":
        return {"status": pairing.status_word(record.status), "reason": _without_paths(" ".join(record.reason.split()))}
    return {
        "status": "passed",
        "us": record.time_us,
        "low": record.ci_low_us,
        "high": record.ci_high_us,
        "gbps": record.gbps,
        "pct": share(record),
        "floor": record.aa_floor,
        "run": f"{zlib.crc32(repr([getattr(record, name) for name in RUN_FIELDS]).encode()):x}",
        "n": record.n,
        "config": record.config_label,
    }


def _evidence(entries: Iterable[cache.CacheEntry], ops: set[str]) -> list[dict[str, Any]]:
    """Return the gain of tuning over the default config, for each case with both times."""
    measured = (entry for entry in entries if entry.evidence.get("time_us") and entry.evidence.get("default_us"))
    timed = [entry for entry in measured if entry.op in ops]
    names = distinct_names(case_name(entry.key) for entry in timed)
    return [
        {
            **_named(name),
            "variant": entry.variant,
            "us": entry.evidence["time_us"],
            "default_us": entry.evidence["default_us"],
            "trials": entry.evidence.get("trials"),
            "config": assignments(entry.config),
        }
        for name, entry in zip(names, timed, strict=True)
    ]
