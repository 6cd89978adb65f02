"""Read, write and find the files of rules, which are JSON beside the configs: `configs/<gpu>/rules/<op>.json`."""

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from kerneltune import device
from kerneltune.files import Versioned, decode_versioned, read_text
from kerneltune.rule import Facts, Rule
from kerneltune.spec import Case

SCHEMA = 2
MOST_BYTES = 4 << 20
"""Size of the largest file that is read."""
_WIDTH = 300
"""Characters of a line."""


@dataclass(frozen=True, slots=True)
class ServingRule:
    """The rule that serves a GPU.

    Attributes:
        rule: the rule.
        device: folder of the GPU that the rule was fitted on, perhaps another GPU.
    """

    rule: Rule
    device: str

    def proposals(self, case: Case) -> Iterator[dict[str, Any]]:
        """Yield the proposals of the rule for a case; nothing if the rule asks for axes or options that the case lacks."""
        try:
            yield from self.rule.proposals(Facts.of(case))
        except (LookupError, ArithmeticError, TypeError, ValueError):  # a rule of other axes
            return

    def told(self, gpu: str) -> str:
        """Return the rule in words."""
        return "the rule" if gpu == self.device else f"the rule of {self.device}"


def path_of(op: str, gpu: str, root: Path) -> Path:
    """Return the file of an operator's rules for a GPU, whether it exists or not."""
    return root / gpu / "rules" / f"{op}.json"


@lru_cache(maxsize=4096)
def serving_rule(root: Path, gpu: str, op: str, variant: str, policy: str) -> ServingRule | None:
    """Return the rule of a variant for a GPU: its own, else the rule of the nearest known architecture; None if there is none.

    A policy without a rule takes the rule of `cold`. The interpreter has no rules, because nothing is tuned for it. A damaged
    file is a warning and no rule. A warning says once that the rules of another GPU serve.
    """
    if gpu == device.INTERPRETER:
        return None
    is_own = path_of(op, gpu, root).exists()
    for folder in [gpu] if is_own else _by_architecture(root, op):
        found = {rule.policy: rule for rule in load(path_of(op, folder, root)) if rule.variant == variant}
        chosen = found.get(policy, found.get("cold"))
        if chosen is not None:
            if not is_own:
                _say_borrowed(gpu, folder)
            return ServingRule(chosen, folder)
    return None


def _by_architecture(root: Path, op: str) -> list[str]:
    """Return the folders with rules of an operator, the nearest architecture first."""
    here = device.current().arch
    found = sorted(path.parent.parent.name for path in root.glob(f"*/rules/{op}.json"))
    return sorted(found, key=lambda gpu: _apart(here, _arch(path_of(op, gpu, root))))


def _arch(path: Path) -> str:
    try:
        return str(json.loads(read_text(path, MOST_BYTES))["fitted"]["arch"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _apart(a: str, b: str) -> tuple[bool, int]:
    """Return whether two architectures such as sm_90 and sm_100 have different makers, and the difference of their numbers."""
    makers = [re.sub(r"[^a-z]", "", arch) for arch in (a, b)]
    numbers = [int(re.sub(r"\D", "", arch) or 0) for arch in (a, b)]
    return makers[0] != makers[1], abs(numbers[0] - numbers[1])


@lru_cache(maxsize=64)
def _say_borrowed(gpu: str, other: str) -> None:
    warnings.warn(f"no rules for {gpu}: those of {other}, the nearest known architecture, serve", stacklevel=6)


@lru_cache(maxsize=1024)
def load(path: Path) -> tuple[Rule, ...]:
    """Return the rules in a file; a file that cannot be read or is damaged gives a warning and no rules."""
    try:
        return load_strict(path)
    except ValueError as error:
        warnings.warn(f"{error}; not used", stacklevel=4)
        return ()


def load_strict(path: Path) -> tuple[Rule, ...]:
    """Return the rules in a file."""
    text = read_text(path, MOST_BYTES)
    try:
        return loads(text, path.stem, path.parent.parent.name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def forget() -> None:
    """Forget every file that was read."""
    for remembered in (serving_rule, load, _say_borrowed):
        remembered.cache_clear()


class _RuleFile(Versioned):
    """A file of rules."""

    op: str
    device: str
    rules: tuple[Rule, ...]


def loads(text: str, op: str, device: str) -> tuple[Rule, ...]:
    """Return the rules in a file's text."""
    return decode_versioned(text, _RuleFile, SCHEMA, op=op, device=device).rules


def dumps(op: str, device: str, rules: Sequence[Rule], fitted: Mapping[str, Any]) -> str:
    """Return the text of a file of rules."""
    rows = msgspec.to_builtins(list(rules))
    return _laid_out({"schema": SCHEMA, "op": op, "device": device, "fitted": dict(fitted), "rules": rows}) + "\n"


def _laid_out(value: Any, indent: str = "") -> str:
    """Return a value as JSON; questions and long values have an item per line."""
    text = json.dumps(value)
    if not isinstance(value, dict | list | tuple) or (len(text) <= _WIDTH and '"then": ' not in text):
        return text
    inner = f"{indent}  "
    named = value.items() if isinstance(value, dict) else [(None, item) for item in value]
    items = [("" if name is None else f"{json.dumps(name)}: ") + _laid_out(item, inner) for name, item in named]
    return text[0] + ",".join(f"\n{inner}{item}" for item in items) + f"\n{indent}{text[-1]}"
