"""What is suspicious about captured kernels: keys, lists, and results that depend on the config.

Reads a capture and what tuning has stored below it; runs nothing. Imports folder, overview and table.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from kerneltune.adopt.encoding import read_json
from kerneltune.adopt.folder import LaunchClass
from kerneltune.adopt.kernels import config_label, stored_key
from kerneltune.adopt.overview import Capture, left_out, omitted, unknown_keys
from kerneltune.search.trials import SUFFIX, history

_LARGEST = 256 << 20

_SHOWN = 6


def findings(capture: Capture) -> list[str]:
    """Return one line for each finding, kernel by kernel."""
    wins = _chosen_configs(capture.root)
    wrong = _wrong_trials(capture.root)
    found: list[str] = []
    for launches in capture.kernels().values():
        found += [f"{launches[0].kernel.text}: {text}" for text in _of_kernel(launches, wins, wrong)]
    return [*found, *_several_lists(capture.classes), *capture.problems]


def _several_lists(launches: Sequence[LaunchClass]) -> Iterator[str]:
    """Yield a line for each kernel of which launches with equal keys had different lists of configs."""
    lists: dict[str, dict[str, set[str]]] = {}
    for one in launches:
        of_key = lists.setdefault(one.kernel.text, {})
        of_key.setdefault(repr((one.source, one.key, one.dtypes)), set()).add(one.configs)
    for name, of_key in lists.items():
        most = max(map(len, of_key.values()))
        if most > 1:
            said = "triton.autotune runs later launches with a choice from the first list"
            yield f"{name}: {most} lists of configs for one key: {said}"


def _of_kernel(launches: Sequence[LaunchClass], wins: dict[str, set[str]], wrong: dict[str, list[str]]) -> Iterator[str]:
    first = launches[0]
    if unknown := unknown_keys(first):
        yield f"key names no argument: {', '.join(unknown)}"
    varying = left_out(launches)
    if varying:
        yield f"key omits sizes that differ between captured launches: {', '.join(varying[:_SHOWN])}"
    elif sizes := omitted(first):
        yield f"key omits sizes: {', '.join(sizes[:_SHOWN])}"
    chosen = {key for launch in launches for key in wins.get(launch.digest, ())}
    if chosen:
        never = [one for one in first.candidates if one.is_author and stored_key(one.config) not in chosen]
        if never:
            labels = "; ".join(config_label(one.config) for one in never[:3])
            yield f"{len(never)} of {first.list_size} configs never win in {len(launches)} classes: {labels}…"
    results = [text for launch in launches for text in wrong.get(launch.digest, ())]
    if results:
        yield f"results change with the config: {len(results)} configs disagree with the author's first: {results[0]}"


def _chosen_configs(root: Path) -> dict[str, set[str]]:
    """Return the configs that tuning has chosen, by class."""
    found: dict[str, set[str]] = {}
    for path in sorted((root / "served").glob("*.json")):
        try:
            for kernel in read_json(path, _LARGEST).get("kernels", ()):
                for row in (row for group in kernel["groups"] for row in group["rows"]):
                    found.setdefault(row["evidence"]["class"], set()).add(stored_key(row["configs"][0]))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return found


def _wrong_trials(root: Path) -> dict[str, list[str]]:
    """Return what disagreed with the author's first config, by class."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "results" / "runs" / "trials").glob(f"*/*{SUFFIX}")):
        try:
            rows = history(path)
        except ValueError:
            continue
        for row in rows:
            if row["status"] == "wrong" and "launch" in row["options"]:
                found.setdefault(row["options"]["launch"], []).append(f"{row['config']}: {row['detail']}")
    return found
