"""A child process: what configs of the package on its path launch, as digests of Triton's IR, grids and scalar arguments.

Run by file name beside the package of any revision, so it imports nothing of kerneltune but the nouns and the operators of that
package. Nothing is compiled beyond Triton's own IR, which takes a twentieth of the time that machine code takes.
"""

import hashlib
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

_SHARED_BYTES = 232448
_SEEN = "seen_by_kerneltune"


class Launches:
    """Stands for Triton's utilities and launchers: keeps a text of everything that is launched."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": _SHARED_BYTES, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        return 0, 0, 0, 0, 1024

    def launcher(self, source: Any, metadata: Any) -> Any:
        kernel, count = getattr(metadata, _SEEN), len(source.fn.arg_names)
        constants = {place[0] for place in source.constants}  # the kernel's text has them

        def launch(*given: Any) -> None:
            arguments = [_plain(value) for place, value in enumerate(given[-count:]) if place not in constants]
            self.texts.append(f"{kernel} {given[:3]} {arguments}")

        return launch

    def stop_early(self, _backend: Any = None, stages: Any = None, options: Any = None, *_: Any) -> tuple[str, str] | None:
        """Triton's hook into its stages: the first one, Triton's own IR, is the only one."""
        if stages is None:
            return "launches", ""
        first, last = list(stages)[0], list(stages)[-1]
        to_ir = stages[first]

        def digested(source: Any, metadata: Any) -> Any:
            module = to_ir(source, metadata)
            text = module.str_nodebug()
            metadata |= dict.fromkeys(("shared", "tmem_size", "global_scratch_size", "profile_scratch_size"), 0)
            metadata |= {"global_scratch_align": 1, "profile_scratch_align": 1, "name": "kernel"}
            metadata[_SEEN] = hashlib.sha256(f"{text} {options}".encode()).hexdigest()
            return module

        stages.clear()
        stages |= {first: digested, last: lambda _source, _metadata: b""}
        return None


def _plain(value: Any) -> Any:
    """What a launch has of an argument: numbers as they are, tensors by type; what is Triton's own is nothing."""
    if isinstance(value, bool | int | float | str):
        return value
    return str(value.dtype) if hasattr(value, "data_ptr") else None


def digest(op: Any, values: dict[str, Any], launches: Launches, case_type: Any) -> str:
    """Of everything that a config launches; empty where this revision cannot run it."""
    launches.texts.clear()
    pairs = (tuple(values[name].items()) for name in ("axes", "options"))
    axes, options = pairs
    try:
        case = case_type(values["case"], axes, values["dtype"], values["quant"], options)
        variant = op.variant(values["variant"])
        variant.run(op.inputs(case, device="meta"), variant.config_from(values["config"]))
    except Exception:  # whatever another revision's code says of what it does not know
        return ""
    return hashlib.sha256("\n".join(launches.texts).encode()).hexdigest() if launches.texts else ""


def main(operators: str, asked: str, answer: str) -> None:
    """asked: a JSON file of entries with `op`; answer: a file for [source hash, digest] of each."""
    from triton import knobs
    from triton.runtime.driver import driver

    spec = importlib.util.spec_from_file_location("dry", Path(__file__).parents[1] / "measuring" / "dry.py")
    assert spec is not None and spec.loader is not None
    dry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(dry)
    launches = Launches()
    driver.set_active(dry.dry_driver("cuda", 90, 32, launches, launches.launcher))
    knobs.runtime.add_stages_inspection_hook = launches.stop_early
    known = importlib.import_module(operators).load()
    case_type = importlib.import_module("kerneltune.spec").Case
    found = []
    for values in json.loads(Path(asked).read_text(encoding="utf-8")):
        op = known.get(values["op"])
        found.append(["", ""] if op is None else [op.source_hash, digest(op, values, launches, case_type)])
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
