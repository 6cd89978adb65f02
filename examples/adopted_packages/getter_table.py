"""Put the results of `kerneltune adopt getter` in a folder into a file of `results`, as a model of it.

python getter_table.py FOLDER FILE.json --model "Qwen3-30B-A3B in fp8" --commit 0123abcd --seconds 181
"""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

from kerneltune.adopt.getter import operators, read_spec


def entries_of(folder: Path) -> list[dict[str, Any]]:
    """Return the configs of the calls that were tuned last, with the evidence of their search."""
    (file,) = folder.glob(f"configs/*/{operators(str(folder))[0].name}.json")
    entries: list[dict[str, Any]] = json.loads(file.read_text())["entries"]
    return entries


def rows_of(folder: Path) -> list[dict[str, object]]:
    """Return a row for each searched call: times, paired speedup with its interval, the program's own config and the best."""
    own = {tuple(case.sizes.items()): case.own for case in read_spec(folder).cases}
    rows = []
    for entry in entries_of(folder):
        evidence, sizes = entry["evidence"], entry["axes"]
        is_faster = evidence.get("over_default", [1.0])[0] > 1
        config = own[tuple(sizes.items())] | (
            {name: value for name, value in entry["config"].items() if value} if is_faster else {}
        )
        rows.append({
            "tokens": sizes["tokens"], "own_us": evidence["default_us"],
            "time_us": evidence["time_us"] if is_faster else evidence["default_us"],
            "speedup": evidence["gain"] if is_faster else 1.0, "over_own": evidence["over_default"] if is_faster else [1.0, 1.0],
            "trials": evidence["trials"], "own": own[tuple(sizes.items())], "config": config,
        })  # fmt: skip
    return rows


def main() -> None:
    """Replace the model in the file, or append it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    for name in ("model", "commit", "seconds"):
        parser.add_argument(f"--{name}", required=True)
    given = parser.parse_args()
    spec, results = read_spec(given.folder), json.loads(given.file.read_text())
    sizes = {name: size for name, size in spec.cases[0].sizes.items() if name != "tokens"}
    date = max(entry["evidence"]["date"] for entry in entries_of(given.folder))
    named = ",".join(f"{name}={value}" for name, value in msgspec.to_builtins(spec.weights).items()).replace(" ", "")
    model = {
        "model": given.model, "sizes": sizes, "named": named, "commit": given.commit, "seconds": int(given.seconds),
        "date": date, "rows": rows_of(given.folder),
    }  # fmt: skip
    results["models"] = [*(one for one in results["models"] if one["model"] != given.model), model]
    text = json.dumps(results, separators=(",", ":"), ensure_ascii=False)
    given.file.write_text(text.replace('{"tokens"', '\n{"tokens"').replace('{"model"', '\n{"model"') + "\n")


if __name__ == "__main__":
    main()
