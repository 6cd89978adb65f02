"""Give cases the same names in tables, charts and pages, and state the origin of their records."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from kerneltune.records import RIGHT_ALONE, Record, grouped
from kerneltune.spec import Option, TaskKey
from kerneltune.wording import assignments, counted, first_of

_RUN = ("device", "driver", "torch", "triton", "commit")
"""Fields of a record that state its run."""
_PLACE = re.compile(r"[\w.-]+\.py:\d+(?=: )")
_NUMBER = re.compile(r"(?<![\w.:])[-+]?\d[\w.,+-]*")
_CAUSE = re.compile(r"; (row \d+ of|[^; ]+ may (be|come from)) [^;]*")
"""Causes that checks add to a line of `compare`: they may differ between cases of a mistake."""
_SHOWN = 3


def failure_lines(records: Iterable[Record], passed: Iterable[Record] = ()) -> list[str]:
    """Return a line for each mistake of the failed records: its variants, its first case, its reason, its configs.

    Reasons that share FILE:LINE, or that differ in numbers alone, are one mistake. So are values that host code keeps, for which
    no config is to blame.

    passed: further configs that passed in a case. Records that passed in the case tell configs apart.
    """
    by_variant = grouped([*records, *passed], lambda record: (record.op, record.variant))
    failed = [row for rows in by_variant.values() for row in rows if row.status == "failed"]
    lines = []
    for rows in grouped(failed, lambda record: (record.op, _mistake(record))).values():
        first, cases = rows[0], dict.fromkeys(map(_case_of, rows))
        variants = grouped(rows, lambda record: record.variant)
        more = f" and {counted(len(cases) - 1, 'more case')}" if len(cases) > 1 else ""
        configs = [_configs_of(part, by_variant[first.op, variant]) for variant, part in variants.items()]
        is_named = any(configs) and not first.reason.startswith(RIGHT_ALONE)
        with_configs = f"; with {', '.join(filter(None, configs))}" if is_named else ""
        where = f"{first.op} {first_of(variants, _SHOWN)}: {_case_of(first)}{more}"
        lines.append(f"{where}: {_reason_of(first)}{with_configs}")
    return lines


def _configs_of(failed: Sequence[Record], known: Iterable[Record]) -> str:
    """Return the knobs whose values no config that passed has; else the config, or the number of configs.

    Configs that passed in the failed cases count alone, if there are any. A variant with a single config has no text, because
    no config tells more.
    """
    configs = [row.config for row in {row.config_label: row for row in failed}.values() if row.config]
    rows, cases = [row for row in known if row.status in ("passed", "checked")], {row.key.case for row in failed}
    in_cases = [row.config for row in rows if row.config and row.key.case in cases]
    passed = in_cases or [row.config for row in rows if row.config]
    if len({row.config_label for row in known}) == 1:
        return ""
    new = dict[str, str]()
    for knob in configs[0] if configs and passed else ():
        values = dict.fromkeys(config.get(knob) for config in configs)
        if not any(config.get(knob) in values for config in passed):
            new[knob] = "/".join([*map(str, values)][:_SHOWN]) + "/…" * (len(values) > _SHOWN)
    if new or len(configs) == 1:
        return assignments(new or configs[0])
    return counted(len(configs), "config") if configs else ""


def _mistake(record: Record) -> str:
    if record.reason.startswith(RIGHT_ALONE):
        return RIGHT_ALONE
    place = _PLACE.search(record.reason)
    return place[0] if place else _NUMBER.sub("#", _CAUSE.sub("", _reason_of(record)))


def _case_of(record: Record) -> str:
    """Return the name of a case, and the sizes, options and modes that the name of a derived case does not tell."""
    if "launch" in record.options:  # of a capture: its name holds kernel and digest
        return f"launch {record.case} {assignments(record.axes)}".rstrip()
    told, policy = record.case.split(",")[1:], [record.policy] if record.policy != "cold" else []
    texts = {f"{name}={value}": f"{name}={value}" for name, value in {**record.axes, **record.options}.items()}
    texts |= {f"dtype={record.dtype}": record.dtype} | {f"quant={quant}": quant for quant in [record.quant] if quant != "none"}
    return " ".join([record.case, *(text for key, text in texts.items() if key not in told), *policy])


def _reason_of(record: Record) -> str:
    return record.reason.removesuffix(f", for {record.op} {record.key.case.label}")


@dataclass(frozen=True, slots=True)
class CaseName:
    """Hold the names of a case, and the words by which it differs from the other cases of a table.

    Attributes:
        case: the case's name, which is no part of its key.
        options: options, policy and device by name; `distinct_names` keeps the entries that differ between cases.
        kind: the operator's name without the words that all operators begin with, such as `fwd`; the last word always stays.
    """

    op: str
    case: str
    dtype: str
    quant: str
    axes: Mapping[str, int]
    options: Mapping[str, Option]
    kind: str = ""

    @property
    def settings(self) -> str:
        """Return the options in one line: `layout=both groups=zipf`; empty without options."""
        return assignments(self.options)

    @property
    def shape(self) -> str:
        """Return the sizes: `8192×4096`."""
        return "×".join(map(str, self.axes.values()))

    @property
    def title(self) -> str:
        """Return the title of a chart of these shapes: `rmsnorm_fwd · fp8 · bfloat16 · row_pad=8`."""
        return " · ".join(filter(None, [self.op, self.quant, self.dtype, self.settings]))


def case_names(records: Iterable[Record]) -> list[CaseName]:
    """Return the names of the records' cases, with the words by which the cases differ."""
    return distinct_names(case_name(record.key, device=record.device) for record in records)


def case_name(key: TaskKey, **more: str) -> CaseName:
    """Return the names of a task's case; the policy and `more` count as options."""
    case = key.case
    options = {**dict(case.options), "policy": key.policy, **more}
    return CaseName(key.op, case.name, case.dtype, case.quant, case.sizes, options)


def distinct_names(cases: Iterable[CaseName]) -> list[CaseName]:
    """Return the cases with their kinds, without options that are equal in all cases that have them."""
    cases = list(cases)
    values: dict[str, set[str]] = {}
    for case in cases:
        for name, value in case.options.items():
            values.setdefault(name, set()).add(str(value))
    words_of = {case.op: case.op.split("_") for case in cases}
    num_equal = sum(1 for _ in takewhile(lambda words: len(set(words)) == 1, zip(*words_of.values(), strict=False)))
    num_shared = min((num_equal, *(len(words) - 1 for words in words_of.values())))
    named = []
    for case in cases:
        options = {name: value for name, value in case.options.items() if len(values[name]) > 1}
        named.append(replace(case, options=options, kind="_".join(words_of[case.op][num_shared:])))
    return named


def by_family(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the records of every family, in order of appearance; a record without a family counts to its operator."""
    return grouped(records, lambda record: record.family or record.op)


def source_facts(records: Sequence[Record], between: str = " and ", fields: Sequence[str] = _RUN) -> dict[str, str]:
    """Return the values of the records' fields, without doubles, and their days; commit hashes have 7 digits."""
    facts = {}
    for name in fields:
        values = dict.fromkeys(_WHOLE_HASH.sub(r"\1", getattr(record, name)) for record in records)
        facts[name] = between.join(values)
    days = sorted({record.date[:10] for record in records})
    return facts | {"measured": " to ".join(dict.fromkeys((days[0], days[-1])))}


def source(records: Sequence[Record], fields: Sequence[str] = _RUN) -> str:
    """Return the GPU, the versions, the commits and the days of the records."""
    facts = source_facts(records, fields=fields)
    return ", ".join(value if name in ("device", "measured") else f"{name} {value}" for name, value in facts.items())


_WHOLE_HASH = re.compile(r"\b([0-9a-f]{7})[0-9a-f]{33}\b")
HUES = 8
"""Colours of a chart, and symbols; the page's style has a colour and a symbol for each number."""
_GREY, _OURS = 0, 2
_REST = tuple(hue for hue in range(HUES) if hue not in (_GREY, _OURS))
_USUAL = (
    "pr593", "eager", "compile", "max-autotune", "liger", "quack", "torchao", "scaled_mm", "torch", "torch_bf16", "tinygemm",
    "humming", "staged", "splitk", "streamk", "dequantised", "torchao_rowwise", "rowwise", "tensorwise", "delayed",
)  # fmt: skip


def look(variant: str) -> tuple[int, int]:
    """Return colour and symbol of a variant, by its name alone: the same in every chart and on every page."""
    if variant in ("baseline", "optimized"):
        return (_GREY, 0) if variant == "baseline" else (_OURS, 2)
    number = _USUAL.index(variant) if variant in _USUAL else int(hashlib.sha256(variant.encode()).hexdigest(), 16)
    return _REST[number % len(_REST)], (number + number // len(_REST) + 3) % HUES
