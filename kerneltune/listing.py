"""Facts of operators without their code: what lists and tables say of them, in the index that the package ships.

The index spares a command that only looks the import of torch and triton. `kerneltune ops --index` writes it. A module that the
index lacks is imported, so that an operator is registered by its presence alone.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from kerneltune.files import replace_text
from kerneltune.spec import Op, Option, Role, missing_packages

INDEX = Path(__file__).with_name("index.json")


@dataclass(frozen=True)
class VariantFacts:
    """What is listed of a variant; the fields are those of `Variant`."""

    name: str
    role: Role
    requires: tuple[str, ...] = ()

    def missing(self) -> tuple[str, ...]:
        """Return the required packages that are not installed."""
        return missing_packages(self.requires)


@dataclass(frozen=True)
class OpFacts:
    """What is listed of an operator; the fields are those of `Op`."""

    name: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    quants: tuple[str, ...]
    options: Mapping[str, tuple[Option, ...]]
    variants: tuple[VariantFacts, ...]


def facts_of(op: Op) -> OpFacts:
    """Return what is listed of an operator."""
    variants = tuple(VariantFacts(variant.name, variant.role, variant.requires) for variant in op.variants)
    return OpFacts(op.name, op.axes, op.dtypes, op.quants, dict(op.options), variants)


def listed(
    modules: Iterable[str], family: Callable[[str], Iterable[Op]], before_import: Callable[[], None]
) -> dict[str, OpFacts]:
    """Return the facts of the operators of some modules by name.

    Args:
        modules: their names.
        family: imports a module that the index lacks, and returns its operators.
        before_import: called before that.
    """
    index = _read(INDEX)
    found: dict[str, OpFacts] = {}
    for module in modules:
        if module not in index:
            before_import()
        of_module = index[module] if module in index else map(facts_of, family(module))
        found |= {facts.name: facts for facts in of_module}
    return found


def write(modules: Mapping[str, Iterable[Op]], path: Path = INDEX) -> None:
    """Write the index: the operators by module, a line for each operator.

    Raises:
        ValueError: the file cannot be written; it is as before then.
    """
    lines = [
        f"  {msgspec.json.encode(module).decode()}: [\n    "
        + ",\n    ".join(msgspec.json.encode(facts_of(op)).decode() for op in found)
        + "\n  ]"
        for module, found in sorted(modules.items())
    ]
    replace_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


@cache
def _read(path: Path) -> dict[str, tuple[OpFacts, ...]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[OpFacts, ...]])
    except (OSError, msgspec.MsgspecError):  # without an index the operators are imported
        return {}
