"""The rule of an operator on a GPU: which configs a case tries that has none of its own.

A rule is a decision tree over sizes, type and options whose leaves list configs, the most promising first. It is fitted to
measured times (rules.fit), shipped as JSON beside the configs, and evaluated here in plain Python.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kerneltune import device
from kerneltune.files import Versioned, bad, decode_versioned, read_text
from kerneltune.rounding import next_power_of_2
from kerneltune.spec import Case

SCHEMA = 2
MOST_BYTES = 4 << 20
"""Largest rule file that is read."""
_WIDTH = 300
"""Characters of a line of a rule file."""
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_FACTOR = re.compile(r"([*/])([A-Za-z_]\w*)")
_Name = Annotated[str, Meta(min_length=1)]
_Measure = Annotated[float, Meta(ge=0, lt=1e30)]
_Whole = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
_Plain = bool | _Whole | float | str


class Scaled(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A knob that follows a size within bounds.

    Attributes:
        pow2: the name of the size; the knob follows its next power of two.
        times: what the power of two is multiplied by.
        low, high: the least and the largest value of the knob.
        inverse: whether `times` is divided by the power of two.
    """

    pow2: _Name
    times: _Measure
    low: _Whole
    high: _Whole
    inverse: bool = False

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return the knob's value."""
        whole = next_power_of_2(sizes[self.pow2])
        return min(self.high, max(self.low, int(self.times / whole if self.inverse else self.times * whole)))


Form = dict[str, _Plain | Scaled]
"""A config: knobs in the order of the config class, each a value or one that follows a size; none for the default."""


def knobs_at(form: Form, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the knobs of a form for these sizes."""
    return {name: value.at(sizes) if isinstance(value, Scaled) else value for name, value in form.items()}


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rule is asked about.

    Attributes:
        sizes: size of every axis.
        words: `dtype`, `quant` and every option by name.
    """

    sizes: Mapping[str, int]
    words: Mapping[str, Any]

    @property
    def itemsize(self) -> int:
        """Return bytes of an element."""
        return _ITEMSIZE.get(self.words["dtype"], 1)

    def number(self, expression: str) -> float:
        """Return the value of a product such as `M*N*bytes` or `M/E`; `bytes` is the size of an element."""
        value = 1.0
        for divides, name in _factors(expression):
            size = self.itemsize if name == "bytes" else self.sizes[name]
            value = value / max(size, 1) if divides else value * size
        return value


@lru_cache(maxsize=4096)
def _factors(expression: str) -> tuple[tuple[bool, str], ...]:
    """Return (is divided by, name) of every factor.

    Raises:
        ValueError: the expression is no product.
    """
    found = _FACTOR.findall(f"*{expression}")
    if "".join(map("".join, found)) != f"*{expression}":
        raise bad("if", expression, "a product of sizes, such as M*N or M/E")
    return tuple((sign == "/", name) for sign, name in found)


_IN_JSON = {"subject": "if", "equals": "is", "otherwise": "else"}


class Split(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename=_IN_JSON):
    """A question.

    Attributes:
        subject: a product of sizes where `at_most` is a number, else `dtype`, `quant` or an option.
        at_most: the bound of the product; None where `equals` is asked.
        equals: the value that is asked for.
        then, otherwise: what follows.
    """

    subject: str
    at_most: _Measure | None = None
    equals: _Plain | None = None
    then: "tuple[int, ...] | Split"
    otherwise: "tuple[int, ...] | Split"

    def __post_init__(self) -> None:
        """Raise ValueError where the subject is no product of sizes though a bound is given."""
        if self.at_most is not None:
            _factors(self.subject)

    def holds(self, facts: Facts) -> bool:
        """Return the answer."""
        if self.at_most is None:
            return bool(facts.words.get(self.subject) == self.equals)
        return facts.number(self.subject) <= self.at_most

    def told(self, answer: bool) -> str:
        """Return the answer in words."""
        if self.at_most is None:
            return f"{self.subject} {'=' if answer else '!='} {self.equals}"
        return f"{self.subject} {'<=' if answer else '>'} {self.at_most:g}"


Leaf = tuple[int, ...]
"""The forms to try, by their place in the rule's list, the most promising first."""
Node = Leaf | Split


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rule of one variant under one policy, as it stands in a file.

    Attributes:
        near: log2 distance up to which the config of the nearest recorded sizes is taken before the tree is asked.
        judged: what leave-one-shape-out says: cases, judged, geomean, worst, worst_case; of cases without a recorded config
            observed, observed_geomean, observed_worst; of both unseen and unseen_worst, geometric mean and worst where the kind
            of the tree, too, was chosen without the case's sizes.
        known: values of words that the rule was fitted to; of other values it says nothing. `bytes` stands for the type.
        least: the least size of every axis that the rule was fitted to; of sizes below half of it the rule says nothing.
        forms: what leaves refer to.
        tree: the root.
    """

    variant: _Name
    policy: _Name
    near: _Measure = 0.0
    judged: dict[str, Any] = {}
    known: dict[str, list[Any]] = {}
    least: dict[str, _Whole] = {}
    forms: Annotated[tuple[Form, ...], Meta(min_length=1, max_length=4096)]
    tree: Leaf | Split

    def __post_init__(self) -> None:
        """Raise ValueError where a leaf refers to no form."""
        for place in used(self.tree):
            if not 0 <= place < len(self.forms):
                raise bad("tree", place, f"places in forms, below {len(self.forms)}")

    def knows(self, facts: Facts) -> bool:
        """Return whether the rule was fitted to cases like this one."""
        words = {**facts.words, "bytes": facts.itemsize}
        is_large = all(2 * facts.sizes[axis] >= size for axis, size in self.least.items())
        return is_large and all(words.get(name) in values for name, values in self.known.items())

    def leaf(self, facts: Facts) -> tuple[Leaf, list[str]]:
        """Return the leaf of a case and the answers that lead to it."""
        node, told = self.tree, []
        while isinstance(node, Split):
            answer = node.holds(facts)
            told.append(node.told(answer))
            node = node.then if answer else node.otherwise
        return node, told

    def proposals(self, facts: Facts) -> Iterator[dict[str, Any]]:
        """Yield the knobs of the leaf's forms for a case, the most promising first; none are those of the default."""
        if self.knows(facts):
            for place in self.leaf(facts)[0]:
                yield knobs_at(self.forms[place], facts.sizes)


@dataclass(frozen=True, slots=True)
class Ruling:
    """The rule that serves a GPU, which may be another GPU's.

    Attributes:
        device: the folder of the GPU that the rule was fitted on.
    """

    rule: Rule
    device: str

    def proposals(self, case: Case) -> Iterator[dict[str, Any]]:
        """Yield what the rule proposes for a case; nothing where it asks for what the case does not have."""
        try:
            yield from self.rule.proposals(facts_of(case))
        except (LookupError, ArithmeticError, TypeError, ValueError):  # a foreign rule, of other axes
            return

    def told(self, gpu: str) -> str:
        """Return the rule in words."""
        return "the rule" if gpu == self.device else f"the rule of {self.device}"


def facts_of(case: Case) -> Facts:
    """Return what a rule is asked about."""
    return Facts(dict(case.axes), {"dtype": case.dtype, "quant": case.quant, **dict(case.options)})


def path_of(op: str, gpu: str, root: Path) -> Path:
    """Return the file of an operator's rules for a GPU, there or not."""
    return root / gpu / "rules" / f"{op}.json"


@lru_cache(maxsize=4096)
def ruling(root: Path, gpu: str, op: str, variant: str, policy: str) -> Ruling | None:
    """Return the rule of a variant: the GPU's own, else that of the nearest known architecture; None if there is none.

    A policy without a rule takes that of `cold`. The interpreter, for which nothing is tuned, has none. A damaged file is one
    warning and no rule; the rule of another GPU is said once for each GPU.
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
            return Ruling(chosen, folder)
    return None


def _by_architecture(root: Path, op: str) -> list[str]:
    """Return the folders that have rules of an operator, the nearest architecture first."""
    here = device.current().arch
    found = sorted(path.parent.parent.name for path in root.glob(f"*/rules/{op}.json"))
    return sorted(found, key=lambda gpu: _apart(here, _arch(path_of(op, gpu, root))))


def _arch(path: Path) -> str:
    try:
        return str(json.loads(read_text(path, MOST_BYTES))["fitted"]["arch"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _apart(a: str, b: str) -> tuple[bool, int]:
    """Return how unlike two architectures such as sm_90 and sm_100 are: another maker's, then numbers apart."""
    makers = [re.sub(r"[^a-z]", "", arch) for arch in (a, b)]
    numbers = [int(re.sub(r"\D", "", arch) or 0) for arch in (a, b)]
    return makers[0] != makers[1], abs(numbers[0] - numbers[1])


@lru_cache(maxsize=64)
def _say_borrowed(gpu: str, other: str) -> None:
    warnings.warn(f"no rules for {gpu}: those of {other}, the nearest known architecture, serve", stacklevel=6)


@lru_cache(maxsize=1024)
def load(path: Path) -> tuple[Rule, ...]:
    """Return the rules in a file; none, with one warning, where it cannot be read or is damaged."""
    try:
        return load_strict(path)
    except ValueError as error:
        warnings.warn(f"{error}; not used", stacklevel=4)
        return ()


def load_strict(path: Path) -> tuple[Rule, ...]:
    """Return the rules in a file.

    Raises:
        ValueError: one line naming the file, the field and the value.
    """
    text = read_text(path, MOST_BYTES)
    try:
        return loads(text, path.stem, path.parent.parent.name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def forget() -> None:
    """Forget every file that was read."""
    for remembered in (ruling, load, _say_borrowed):
        remembered.cache_clear()


class _File(Versioned):
    """A file of rules."""

    op: str
    device: str
    rules: tuple[Rule, ...]


def dumps(op: str, device: str, rules: Sequence[Rule], fitted: Mapping[str, Any]) -> str:
    """Return the text of a rule file: what fits a line stands on one."""
    rows = [{name: value for name, value in row.items() if value is not None} for row in msgspec.to_builtins(list(rules))]
    return _laid_out({"schema": SCHEMA, "op": op, "device": device, "fitted": dict(fitted), "rules": rows}) + "\n"


def _laid_out(value: Any, indent: str = "") -> str:
    """Return a value as JSON; questions, and what is too long for a line, are one item a line."""
    text = json.dumps(value)
    if not isinstance(value, dict | list | tuple) or (len(text) <= _WIDTH and '"then": ' not in text):
        return text
    inner = f"{indent}  "
    named = value.items() if isinstance(value, dict) else [(None, item) for item in value]
    items = [("" if name is None else f"{json.dumps(name)}: ") + _laid_out(item, inner) for name, item in named]
    return text[0] + ",".join(f"\n{inner}{item}" for item in items) + f"\n{indent}{text[-1]}"


def loads(text: str, op: str, device: str) -> tuple[Rule, ...]:
    """Return the rules in a file's text.

    Raises:
        ValueError: one line naming the field and what is wrong with it.
    """
    return decode_versioned(text, _File, SCHEMA, op=op, device=device).rules


def used(node: Node) -> Iterator[int]:
    """Yield the places that the leaves of a tree refer to."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Split):
            waiting += [node.then, node.otherwise]
        else:
            yield from node
