"""Evaluate the rule of an operator on a GPU: propose configs for a case that the cache has no config for.

A rule is a decision tree over sizes, type and options. Its leaves list configs, the most promising first. `rules.fit` fits a rule
to measured times, `rule_file` reads and writes rules.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kerneltune.files import bad
from kerneltune.rounding import next_power_of_2
from kerneltune.spec import Case

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_FACTOR = re.compile(r"([*/])([A-Za-z_]\w*)")
Name = Annotated[str, Meta(min_length=1)]
_Measure = Annotated[float, Meta(ge=0, lt=1e30)]
_Whole = Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)]
_Plain = bool | _Whole | float | str


class Scaled(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A knob that follows the next power of two of a size, within bounds.

    Attributes:
        pow2: name of the size.
        times: factor of the power of two.
        low, high: bounds of the knob.
        inverse: whether `times` is divided by the power of two.
    """

    pow2: Name
    times: _Measure
    low: _Whole
    high: _Whole
    inverse: bool = False

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return the value of the knob."""
        whole = next_power_of_2(sizes[self.pow2])
        return min(self.high, max(self.low, int(self.times / whole if self.inverse else self.times * whole)))


Form = dict[str, _Plain | Scaled]
"""A config whose knobs are values or follow a size; an empty form is the default config."""


def knobs_at(form: Form, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the knobs of a form for these sizes."""
    return {name: value.at(sizes) if isinstance(value, Scaled) else value for name, value in form.items()}


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about a case that a rule asks for.

    Attributes:
        sizes: size of every axis.
        words: `dtype`, `quant` and every option, by name.
    """

    sizes: Mapping[str, int]
    words: Mapping[str, Any]

    @classmethod
    def of(cls, case: Case) -> "Facts":
        """Return the facts about a case."""
        return cls(dict(case.axes), {"dtype": case.dtype, "quant": case.quant, **dict(case.options)})

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return _ITEMSIZE.get(self.words["dtype"], 1)

    def number(self, expression: str) -> float:
        """Return the value of a product such as `M*N*bytes` or `M/E`; `bytes` stands for the bytes of an element."""
        value = 1.0
        for divides, name in _factors(expression):
            size = self.itemsize if name == "bytes" else self.sizes[name]
            value = value / max(size, 1) if divides else value * size
        return value


@lru_cache(maxsize=4096)
def _factors(expression: str) -> tuple[tuple[bool, str], ...]:
    """Return (is a divisor, name) of every factor."""
    found = _FACTOR.findall(f"*{expression}")
    if "".join(map("".join, found)) != f"*{expression}":
        raise bad("if", expression, "a product of sizes, such as M*N or M/E")
    return tuple((sign == "/", name) for sign, name in found)


_IN_JSON = {"subject": "if", "equals": "is", "otherwise": "else"}


class Split(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename=_IN_JSON):
    """A question of the tree.

    Attributes:
        subject: product of sizes if `at_most` is given, else `dtype`, `quant` or an option.
        at_most: bound of the product; None for a question about a word.
        equals: value of the word.
        then, otherwise: nodes for the answers yes and no.
    """

    subject: str
    at_most: _Measure | None = None
    equals: _Plain | None = None
    then: "tuple[int, ...] | Split"
    otherwise: "tuple[int, ...] | Split"

    def __post_init__(self) -> None:
        """Raise ValueError if a bound is given for a subject that is no product of sizes."""
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
"""Places in the rule's list of forms, the most promising form first."""
Node = Leaf | Split


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rule of a variant under a policy, as a file holds it.

    Attributes:
        near: log2 distance up to which the config of the nearest recorded sizes serves before the tree is asked.
        judged: quality on left-out shapes. On recorded cases: cases, judged, geomean, worst, worst_case. On cases without a
            recorded config: observed, observed_geomean, observed_worst. On both, with the kind of tree chosen without the case's
            sizes: unseen, unseen_worst.
        known: values of the words that the rule was fitted to; other values are unknown to it. `bytes` stands for the type.
        least: smallest size of every axis that the rule was fitted to; sizes below half of it are unknown to the rule.
        forms: configs of the leaves.
        tree: root of the tree.
    """

    variant: Name
    policy: Name
    near: _Measure = 0.0
    judged: dict[str, Any] = {}
    known: dict[str, list[Any]] = {}
    least: dict[str, _Whole] = {}
    forms: Annotated[tuple[Form, ...], Meta(min_length=1, max_length=4096)]
    tree: Leaf | Split

    def __post_init__(self) -> None:
        """Raise ValueError if a leaf refers to a form that does not exist."""
        for place in used_forms(self.tree):
            if not 0 <= place < len(self.forms):
                raise bad("tree", place, f"places in forms, below {len(self.forms)}")

    def knows(self, facts: Facts) -> bool:
        """Return whether the rule was fitted to similar cases."""
        words = {**facts.words, "bytes": facts.itemsize}
        is_large = all(2 * facts.sizes[axis] >= size for axis, size in self.least.items())
        return is_large and all(words.get(name) in values for name, values in self.known.items())

    def leaf(self, facts: Facts) -> tuple[Leaf, list[str]]:
        """Return the leaf of a case and the answers on the way to it."""
        node, told = self.tree, []
        while isinstance(node, Split):
            answer = node.holds(facts)
            told.append(node.told(answer))
            node = node.then if answer else node.otherwise
        return node, told

    def proposals(self, facts: Facts) -> Iterator[dict[str, Any]]:
        """Yield the knobs of the leaf's forms, the most promising first; empty knobs stand for the default config."""
        if self.knows(facts):
            for place in self.leaf(facts)[0]:
                yield knobs_at(self.forms[place], facts.sizes)


def used_forms(node: Node) -> Iterator[int]:
    """Yield the places of the forms that the leaves of a tree refer to."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Split):
            waiting += [node.then, node.otherwise]
        else:
            yield from node
