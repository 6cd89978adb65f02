"""What becomes of a compilation whose result is inspected and never launched: Triton's stages end where the rest is known.

A kernel's facts stand in the metadata that Triton keeps of it, for `Kernel` to be read from. Decides nothing about configs. May
import triton.
"""

import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kerneltune.identity import module_digest
from kerneltune.measuring import reading
from kerneltune.measuring.assembly import Fact
from kerneltune.measuring.known import KnownFacts, line, parse

FACT = "inspected_by_kerneltune"
"""Of a compiled kernel's metadata: a line of `known`."""

_PLACE = re.compile(r'"([^"\n]*)":(\d+)(?=:\d)')
_DIGEST = "digest_by_kerneltune"
_DIGITS = 20

Stage = Callable[[Any, Any], Any]


class Inspecting:
    """What is done to the stages of a compilation."""

    def __init__(self, known: KnownFacts, backend: str, shared_bytes: int) -> None:
        """backend: triton's; shared_bytes: the most that a program may use."""
        self.known, self.backend, self.shared_bytes = known, backend, shared_bytes

    @property
    def folder(self) -> str:
        """Return the folder of its own in Triton's disk cache: no binary is kept there, and facts as this code read them.

        A folder, as Triton 3.6 does not ask a hook what it adds to the key of an entry.
        """
        of = f"{self.known.check} {self.shared_bytes} {module_digest(__name__)}"
        return f"inspected-{hashlib.sha256(of.encode()).hexdigest()[:_DIGITS]}"

    def change(self, backend: Any, stages: Any, options: Any) -> None:
        """End the stages where the rest is known."""
        names = list(stages)
        made_for = f"{backend.hash()} {_text(options)} {self.shared_bytes}"
        stages[names[0]] = self._identified(stages[names[0]], made_for)
        for name in names[1:-1]:
            stages[name] = self._unless_known(stages[name])
        stages[names[-1]] = self._settled(stages[names[-1]], bool(options.launch_cooperative_grid))

    def _identified(self, to_ir: Stage, made_for: str) -> Stage:
        """Run the first stage, Triton's own IR: all others follow from it and from what it is made for."""

        def stage(source: Any, metadata: Any) -> Any:
            module = to_ir(source, metadata)
            text = f"{ir_text(module)} {made_for} {metadata['triton_version']}"
            digest = metadata[_DIGEST] = hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
            metadata["name"] = module.get_entry_func_name()
            if digest in self.known.facts:
                _settle(metadata, self.known.facts[digest])
            return module

        return stage

    def _unless_known(self, compile_further: Stage) -> Stage:
        def stage(source: Any, metadata: Any) -> Any:
            if FACT in metadata:
                return ""
            found = compile_further(source, metadata)
            if fact := reading.too_large(metadata, self.shared_bytes):  # no need of machine code
                _settle(metadata, fact)
            return found

        return stage

    def _settled(self, to_binary: Stage, cooperative: bool) -> Stage:
        def stage(assembly: Any, metadata: Any) -> bytes:
            if FACT not in metadata:
                binary = to_binary(assembly, metadata) if reading.needs_binary(self.backend) else b""
                _settle(metadata, reading.compiled(self.backend, binary, assembly, metadata, cooperative))
            return b""

        return stage


def fact_of(metadata: Any) -> tuple[str, Fact] | None:
    """Digest and fact of a compiled kernel; None where it was compiled to be launched."""
    return parse(getattr(metadata, FACT)) if hasattr(metadata, FACT) else None


def _settle(metadata: Any, fact: Fact) -> None:
    """Fill in the metadata of a whole compilation, so that nothing is left to be found out."""
    metadata |= dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0)
    metadata |= dict.fromkeys(("global_scratch_align", "profile_scratch_align"), 1)
    metadata |= {"shared": fact.kernel.shared_bytes, "num_warps": fact.kernel.warps, "tmem_size": fact.tensor_columns}
    metadata[FACT] = line(metadata[_DIGEST], fact)


def ir_text(module: Any) -> str:
    """Return the text of Triton's IR.

    Line information is part of the code: ptxas takes the labels that bound an inlined function for joints, and allocates other
    registers. The name of a file, and how far apart its lines are, is not.
    """
    from triton import knobs

    if knobs.compilation.disable_line_info:
        return str(module.str_nodebug())
    text = module.str()
    lines: dict[str, set[int]] = {}
    for file, number in _PLACE.findall(text):
        lines.setdefault(file, set()).add(int(number))
    places = {(file, str(n)): f"{f}:{rank}" for f, file in enumerate(lines) for rank, n in enumerate(sorted(lines[file]))}
    return _PLACE.sub(lambda place: places[place[1], place[2]], text)


def _text(options: Any) -> str:
    """Return all compile options, libraries by content, and the environment variables that Triton heeds."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    values = dict(options.__dict__)
    values["extern_libs"] = [(name, _file_digest(path)) for name, path in values["extern_libs"]]
    return f"{sorted(values.items())} {sorted(get_cache_invalidating_env_vars().items())}"


@cache
def _file_digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
