"""Draw how many times as fast as A each family's B is, with the range of its rows: an SVG for light and dark pages."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from kerneltune.reporting.pairing import BEST_PEER, Comparison

_LABEL, _WIDTH, _RIGHT, _TOP, _LINE, _SMALL_LINE = 150, 760, 70, 64, 26, 16
_TICKS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16)
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1a1f27 }
.title { font-size: 16px; font-weight: 600 } .small { font-size: 11px; fill: #586171 }
.grid { stroke: #dce1e8 } .one { stroke: #586171 } .mean { fill: #0072b2 }
.range { stroke: #0072b2; stroke-width: 3; opacity: .4 }
@media (prefers-color-scheme: dark) {
text { fill: #e4e8ee } .small { fill: #9aa5b5 } .grid { stroke: #303845 } .one { stroke: #9aa5b5 }
.range { stroke: #4aa8e8 } .mean { fill: #4aa8e8 }
}"""


def speedups(families: Mapping[str, Sequence[Comparison]], pairs_of: Mapping[str, tuple[str, str]], source: str) -> str:
    """Return the SVG: a line per family from its worst to its best row, and a dot at the geometric mean.

    The title names A and B of most families; a line below the picture names A and B of each other family.
    """
    all_speedups = {family: [r.speedup for r in rows if r.speedup is not None] for family, rows in families.items()}
    speedups_of = {family: values for family, values in all_speedups.items() if values}
    if not speedups_of:
        sides = ", ".join(dict.fromkeys(f"{a} and {b}" for a, b in pairs_of.values()))
        raise ValueError(f"no case has a time of both {sides}: nothing to draw")
    (usual, _), *_ = Counter(pairs_of[family] for family in speedups_of).most_common(1)
    every = [value for values in speedups_of.values() for value in values]
    low, high = min(0.8, *every) / 1.05, max(1.25, *every) * 1.05

    def x(speedup: float) -> float:
        part = math.log(speedup / low) / math.log(high / low)
        return round(_LABEL + part * (_WIDTH - _RIGHT - _LABEL), 1)

    bottom = _TOP + _LINE * len(speedups_of)
    parts = [
        f'<text class="title" x="8" y="24">{_relation(*usual)} (higher is faster)</text>',
        '<text class="small" x="8" y="42">dot: geometric mean of the cases; line: from the slowest to the fastest case</text>',
    ]
    for tick in (tick for tick in _TICKS if low <= tick <= high):
        parts.append(
            f'<line class="{"one" if tick == 1 else "grid"}" x1="{x(tick)}" x2="{x(tick)}" y1="{_TOP - 6}" y2="{bottom}"/>'
        )
        parts.append(f'<text class="small" x="{x(tick)}" y="{bottom + 14}" text-anchor="middle">{tick:g}x</text>')
    ranked = sorted(speedups_of.items(), key=lambda item: -statistics.geometric_mean(item[1]))
    for nth, (family, values) in enumerate(ranked):
        y, mean = _TOP + _LINE * nth + _LINE // 2, statistics.geometric_mean(values)
        parts.append(f'<text x="{_LABEL - 12}" y="{y + 4}" text-anchor="end">{_words(family)}</text>')
        parts.append(f'<line class="range" x1="{x(min(values))}" x2="{x(max(values))}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="mean" cx="{x(mean)}" cy="{y}" r="5"/>')
        parts.append(f'<text x="{_WIDTH - 8}" y="{y + 4}" text-anchor="end">{mean:.2f}x</text>')
    below = [f"{_words(family)}: {_relation(*pairs_of[family])}" for family, _ in ranked if pairs_of[family] != usual]
    for text in (*below, escape(source)):
        bottom += _SMALL_LINE
        parts.append(f'<text class="small" x="8" y="{bottom + 20}">{text}</text>')
    size = f'viewBox="0 0 {_WIDTH} {bottom + 28}" width="{_WIDTH}" height="{bottom + 28}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{_STYLE}\n</style>'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def _relation(a: str, b: str) -> str:
    """Return A and B in words, for SVG."""
    return escape(f"{b}: speed relative to {'the fastest peer of every case' if a == BEST_PEER else a}")


def _words(family: str) -> str:
    return escape(family.replace("_", " "))
