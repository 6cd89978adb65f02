"""Save and load the facts about configs that compiling alone gives, without a launch."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kerneltune import device
from kerneltune.errors import unknown
from kerneltune.files import bad, decode_versioned, read_bytes, replace_text
from kerneltune.measuring.assembly import TARGETS, Kernel, occupancy_of

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class StaticRow:
    """Hold the kernels of a variant's config for a case, compiled for a target; `error` is the reason if there are no kernels."""

    op: str
    variant: str
    case: str
    policy: str
    target: str
    config: dict[str, Any]
    kernels: tuple[Kernel, ...] = ()
    error: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for a target whose limits are unknown, and for a case in another form than `case_parts` reads."""
        if self.target not in TARGETS:
            raise unknown("target", self.target, TARGETS)
        self.case_parts()

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """Return operator, variant, case, policy and target; a survey has at most one row per key.

        The case is without its name, which may change.
        """
        return self.op, self.variant, self.case.partition(" ")[2], self.policy, self.target

    def case_parts(self) -> tuple[str, list[str], str, str]:
        """Return the name of the case, its sizes and options, such as `M=8`, its type and its mode."""
        name, *words = self.case.split() or [""]
        sizes = [word for word in words if "=" in word]
        try:
            dtype, quant = (word for word in words if "=" not in word)
        except ValueError as error:
            expected = "a name, sizes, an element type and a mode, such as `c M=8 bfloat16 none`"
            raise bad("case", self.case, expected) from error
        return name, sizes, dtype, quant

    @property
    def label(self) -> str:
        """Return the key in one line."""
        return f"{self.op} {self.variant} {self.case}{'' if self.policy == 'cold' else ' ' + self.policy} {self.target}"


@dataclass(frozen=True, slots=True)
class Survey:
    """Hold rows and the version of triton that compiled them: another version allocates other registers.

    Attributes:
        gpu: folder of the GPU model whose configs were compiled; empty in files of older versions.
    """

    triton: str
    rows: tuple[StaticRow, ...]
    gpu: str = ""


def save(path: Path, survey: Survey) -> None:
    """Write a survey to a file, a line per row."""
    facts = f'"triton": {json.dumps(survey.triton)},\n  "gpu": {json.dumps(survey.gpu)}'
    head = f'{{\n  "schema": {SCHEMA},\n  {facts},\n  "rows": [\n'
    rows = ",\n".join("    " + json.dumps(asdict(row), ensure_ascii=False) for row in sorted(survey.rows, key=lambda r: r.key))
    replace_text(path, f"{head}{rows}\n  ]\n}}\n")


def load(path: Path) -> Survey:
    """Read a survey from a file that `save` wrote."""
    data = read_bytes(path)
    try:
        survey = decode_versioned(data, Survey, SCHEMA)
        if survey.gpu != device.slug(survey.gpu):
            raise bad("gpu", survey.gpu, "the name of a folder")
        return survey
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def numbered(kernels: Sequence[Kernel]) -> dict[tuple[str, int], Kernel]:
    """Return the kernels, keyed by name and by the number of earlier kernels with the same name."""
    seen: Counter[str] = Counter()
    by_number = {}
    for kernel in kernels:
        by_number[kernel.name, seen[kernel.name]] = kernel
        seen[kernel.name] += 1
    return by_number


def facts(kernel: Kernel, target: str) -> dict[str, str]:
    """Return heading -> value of a kernel on a target, in print; accesses are widths in bits and counts: `128x4 32x1`."""
    held = occupancy_of(kernel, target)
    widths = {a.kind: " ".join(f"{b.bits}x{b.count}" for b in kernel.accesses if b.kind == a.kind) for a in kernel.accesses}
    return {
        "target": target,
        "regs": f"{kernel.registers}",
        "spill": f"{kernel.spill_bytes}",
        "shared": f"{kernel.shared_bytes}",
        "programs": f"{held.programs}",
        "warps": f"{held.warps}/{held.of_warps}",
        "limiter": held.limiter,
        "loads": widths.get("load", "-"),
        "stores": widths.get("store", "-"),
    }
