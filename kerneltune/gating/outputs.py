"""Convert new records to the formats of dashboards: Bencher, github-action-benchmark, PyTorch HUD.

The output has the newest timed record of each row. The functions are pure and write no file.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kerneltune.records import Record, newest

_NS_PER_US = 1000.0


def bencher(records: Iterable[Record]) -> str:
    """Return Bencher Metric Format: benchmark -> `latency` in ns with its 95 % interval, and `throughput` in bytes per second.

    The text is for `bencher run --adapter json --file FILE`.
    """
    found = {
        name: {
            "latency": {
                "value": _us(record.time_us) * _NS_PER_US,
                "lower_value": _us(record.ci_low_us) * _NS_PER_US,
                "upper_value": _us(record.ci_high_us) * _NS_PER_US,
            },
            "throughput": {"value": (record.gbps or 0.0) * 1e9},
        }
        for name, record in _named(records)
    }
    return _json(found)


def action_benchmark(records: Iterable[Record]) -> str:
    """Return the JSON that `benchmark-action/github-action-benchmark` reads with `tool: customSmallerIsBetter`."""
    found = [
        {
            "name": name,
            "unit": "µs",
            "value": record.time_us,
            "range": f"± {(_us(record.ci_high_us) - _us(record.ci_low_us)) / 2:.4g}",
            "extra": "\n".join(
                [f"config {record.config_label}", f"commit {record.commit}", f"GPU {record.device} {record.unit}"]
            ),
        }
        for name, record in _named(records)
    ]
    return _json(found)


def hud(records: Iterable[Record]) -> str:
    """Return benchmark records of the PyTorch HUD: latency in µs and bandwidth in GB/s, with all samples of a record."""
    found: list[dict[str, Any]] = []
    for _name, record in _named(records):
        samples = [time for rounds in record.samples_us or () for time in rounds] or [_us(record.time_us)]
        metrics: Sequence[tuple[str, str, list[Any]]] = (("latency", "us", samples), ("bandwidth", "GB/s", [record.gbps]))
        found += [_hud_record(record, *metric) for metric in metrics]
    return _json(found)


FORMATS: Mapping[str, Callable[[Iterable[Record]], str]] = {
    "bencher": bencher,
    "github-action-benchmark": action_benchmark,
    "hud": hud,
}
"""Name of a format -> the function that makes its text."""


def _hud_record(record: Record, metric: str, unit: str, values: list[Any]) -> dict[str, Any]:
    return {
        "benchmark": {
            "name": f"kerneltune {record.family or record.op}",
            "mode": record.policy,
            "dtype": record.dtype,
            "extra_info": {"device": record.device, "quant": record.quant, **_texts(record.axes), **_texts(record.options)},
        },
        "model": {"name": f"{record.op} {record.case}", "type": "kernel", "backend": record.variant},
        "metric": {"name": metric, "unit": unit, "benchmark_values": values},
        "dependencies": {name: {"version": getattr(record, name)} for name in ("torch", "triton", "driver")},
    }


def _named(records: Iterable[Record]) -> list[tuple[str, Record]]:
    """Return each timed row with its name, which is the same in every run."""
    timed = [record for record in newest(records) if record.status == "passed"]
    several = len({record.device for record in timed}) > 1
    return [(f"{r.label} {r.variant}{f' {r.device}' if several else ''}", r) for r in timed]


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _us(value: float | None) -> float:
    assert value is not None
    return value


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
