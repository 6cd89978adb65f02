"""The rule of an operator on a GPU: which configs a case tries that has none of its own.

A rule is a decision tree over sizes, type and options whose leaves list configs, the most promising first. It is fitted to
measured times (tuning.fit), shipped as JSON beside the configs, and evaluated here in plain Python.
"""

import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from kerneltune import device
from kerneltune.files import read_text
from kerneltune.rounding import next_power_of_2
from kerneltune.spec import Case

SCHEMA = 1
MOST_BYTES = 4 << 20
"""Largest rule file that is read."""
_MOST_NODES, _DEEPEST = 4096, 32
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_FACTOR = re.compile(r"(pow2|low)?\(?([A-Za-z_]\w*)\)?")
_PLAIN = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Scaled:
    """A knob that follows a size.

    Attributes:
        axis: the name of the size.
        factor: the knob is `factor` times the size's next power of two, or `factor` divided by it.
        inverse: whether it is divided.
    """

    axis: str
    factor: float
    inverse: bool = False

    def at(self, sizes: Mapping[str, int]) -> int:
        """Return the knob's value, 1 at least."""
        whole = next_power_of_2(sizes[self.axis])
        return max(1, int(self.factor / whole if self.inverse else self.factor * whole))

    @property
    def data(self) -> dict[str, Any]:
        """The knob as JSON."""
        return {"pow2": self.axis, "over" if self.inverse else "times": self.factor}


@dataclass(frozen=True, slots=True)
class Form:
    """A config whose knobs are values or follow a size; one without knobs is the variant's default.

    Attributes:
        knobs: (name, value or Scaled) pairs in the order of the config class.
    """

    knobs: tuple[tuple[str, Any], ...]

    def at(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Return the knobs for these sizes."""
        return {name: value.at(sizes) if isinstance(value, Scaled) else value for name, value in self.knobs}

    @property
    def data(self) -> dict[str, Any]:
        """The form as JSON."""
        return {name: value.data if isinstance(value, Scaled) else value for name, value in self.knobs}


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
        """Return the value of a product such as `M*N*bytes`, `M/E`, `pow2(N)/N` or `low(K)`.

        `bytes` is the size of an element, `pow2` the next power of two, `low` the largest power of two that divides.
        """
        return _evaluated(_parsed(expression), self)


_Factors = tuple[tuple[bool, str, str], ...]
_parsed_before: dict[str, _Factors] = {}


def _parsed(expression: str) -> _Factors:
    """Return (is divided by, function, name) of every factor.

    Raises:
        ValueError: the expression is no product.
    """
    found = _parsed_before.get(expression)
    if found is None:
        parts = re.split(r"([*/])", expression)
        signs = ["*", *parts[1::2]]
        factors = []
        for sign, text in zip(signs, parts[::2], strict=True):
            match = _FACTOR.fullmatch(text)
            if match is None:
                raise ValueError(f"if: {expression!r}: expected a product of sizes, such as M*N or M/E")
            factors.append((sign == "/", match[1] or "", match[2]))
        found = _parsed_before[expression] = tuple(factors)
    return found


def _evaluated(factors: _Factors, facts: Facts) -> float:
    value = 1.0
    for divides, function, name in factors:
        size = facts.itemsize if name == "bytes" else facts.sizes[name]
        if function == "pow2":
            size = next_power_of_2(size)
        elif function == "low":
            size = size & -size
        value = value / max(size, 1) if divides else value * size
    return value


@dataclass(frozen=True, slots=True)
class Leaf:
    """The forms to try, by their place in the rule's list, the most promising first."""

    use: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """A question.

    Attributes:
        subject: a product of sizes where `at_most` is a number, else `dtype`, `quant` or an option.
        at_most: the bound of the product; None where `equals` is asked.
        equals: the value that is asked for.
    """

    subject: str
    at_most: float | None
    equals: Any
    then: "Leaf | Split"
    otherwise: "Leaf | Split"

    def holds(self, facts: Facts) -> bool:
        """Return the answer."""
        if self.at_most is None:
            return bool(facts.words.get(self.subject) == self.equals)
        return facts.number(self.subject) <= self.at_most


Node = Leaf | Split


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one variant under one policy.

    Attributes:
        forms: what leaves refer to.
        tree: the root.
        known: values of words that the rule was fitted to; of others it says nothing. `bytes` stands for the type.
        near: log2 distance up to which the config of the nearest recorded sizes is taken before the tree is asked.
        judged: what leave-one-shape-out says: cases, judged, geomean, worst, worst_case; of cases without a recorded config
            observed, observed_geomean, observed_worst.
    """

    variant: str
    policy: str
    forms: tuple[Form, ...]
    tree: Node
    near: float = 0.0
    judged: Mapping[str, Any] = field(default_factory=dict)
    known: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def knows(self, facts: Facts) -> bool:
        """Return whether the rule was fitted to cases of this kind."""
        words = {**facts.words, "bytes": facts.itemsize}
        return all(words.get(name) in values for name, values in self.known.items())

    def leaf(self, facts: Facts) -> Leaf:
        """Return the leaf of a case."""
        node = self.tree
        while isinstance(node, Split):
            node = node.then if node.holds(facts) else node.otherwise
        return node

    def path(self, facts: Facts) -> list[str]:
        """Return the answers that lead to a case's leaf, one text each."""
        node, told = self.tree, []
        while isinstance(node, Split):
            yes = node.holds(facts)
            sign, bound = ("=" if yes else "!=", node.equals) if node.at_most is None else ("<=" if yes else ">", node.at_most)
            told.append(f"{node.subject} {sign} {bound:g}" if node.at_most is not None else f"{node.subject} {sign} {bound}")
            node = node.then if yes else node.otherwise
        return told

    def proposals(self, facts: Facts) -> Iterator[dict[str, Any]]:
        """Yield the knobs of the leaf's forms for a case, the most promising first; none are those of the default."""
        if self.knows(facts):
            for index in self.leaf(facts).use:
                yield self.forms[index].at(facts.sizes)


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
    own = path_of(op, gpu, root)
    if own.exists():
        return _of_variant(load(own), gpu, variant, policy)
    for other in _by_architecture(root, op):
        found = _of_variant(load(path_of(op, other, root)), other, variant, policy)
        if found is not None:
            _say_borrowed(gpu, other)
            return found
    return None


def _of_variant(rules: Sequence[Rule], gpu: str, variant: str, policy: str) -> Ruling | None:
    found = {rule.policy: rule for rule in rules if rule.variant == variant}
    chosen = found.get(policy, found.get("cold"))
    return None if chosen is None else Ruling(chosen, gpu)


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
    try:
        if not path.is_file() or path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path}: file: expected a regular file of at most {MOST_BYTES >> 20} MiB")
        return loads(path.read_text(encoding="utf-8"), path.stem, path.parent.parent.name)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {path}: not UTF-8") from error
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def forget() -> None:
    """Forget every file that was read."""
    for remembered in (ruling, load, _say_borrowed):
        remembered.cache_clear()


def dumps(op: str, device: str, rules: Sequence[Rule], fitted: Mapping[str, Any]) -> str:
    """Return the text of a rule file: one form a line, the tree indented."""
    head = {"schema": SCHEMA, "op": op, "device": device, "fitted": dict(fitted)}
    lines = ["{", *(f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()), '  "rules": [']
    for place, rule in enumerate(rules):
        lines += ["    {"]
        for name in ("variant", "policy", "near"):
            lines.append(f"      {json.dumps(name)}: {json.dumps(getattr(rule, name))},")
        lines += [f'      "judged": {json.dumps(dict(rule.judged))},', f'      "known": {json.dumps(dict(rule.known))},']
        lines += ['      "forms": [']
        forms = [f"        {json.dumps(form.data)}" for form in rule.forms]
        lines += [",\n".join(forms), "      ],", '      "tree":']
        lines += [f"      {line}" for line in _drawn(rule.tree)]
        lines += ["    }" + ("," if place + 1 < len(rules) else "")]
    return "\n".join([*lines, "  ]", "}"]) + "\n"


def _drawn(node: Node) -> list[str]:
    if isinstance(node, Leaf):
        return [f'{{"use": {json.dumps(list(node.use))}}}']
    test = {"at_most": node.at_most} if node.at_most is not None else {"is": node.equals}
    asked = json.dumps({"if": node.subject, **test})[:-1]
    then, otherwise = _drawn(node.then), _drawn(node.otherwise)
    return [
        f"{asked},", ' "then":', *(f"  {line}" for line in then[:-1]), f"  {then[-1]},",
        ' "else":', *(f"  {line}" for line in otherwise[:-1]), f"  {otherwise[-1]}}}",
    ]  # fmt: skip


def loads(text: str, op: str, device: str) -> tuple[Rule, ...]:
    """Return the rules in a file's text.

    Raises:
        ValueError: one line naming the field and what is wrong with it.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"JSON: {str(error)[:120]}") from error
    if not isinstance(data, dict):
        raise ValueError(f"JSON: expected an object, got {type(data).__name__}")
    for name, expected in {"schema": SCHEMA, "op": op, "device": device}.items():
        if data.get(name) != expected:
            raise ValueError(f"{name}: {_shown(data.get(name))}: expected {expected!r}")
    if not isinstance(data.get("rules"), list):
        raise ValueError(f"rules: {_shown(data.get('rules'))}: expected a list")
    return tuple(_rule(index, item) for index, item in enumerate(data["rules"]))


def _rule(index: int, item: Any) -> Rule:
    where = f"rules[{index}]"
    if not isinstance(item, dict):
        raise ValueError(f"{where}: {_shown(item)}: expected an object")
    try:
        variant, policy = (
            _field(item, name, lambda v: isinstance(v, str) and bool(v), "a name") for name in ("variant", "policy")
        )
        near = _field(item, "near", _is_measure, "a number of 0 or more")
        forms = _field(item, "forms", lambda v: isinstance(v, list) and 0 < len(v) <= _MOST_NODES, "a list of forms")
        judged = _field(item, "judged", lambda v: isinstance(v, dict), "an object")
        known = _field(item, "known", _is_known, "lists of values by word")
        made = tuple(_form(place, form) for place, form in enumerate(forms))
        return Rule(variant, policy, made, _node(item.get("tree"), len(made), 0), float(near), judged, known)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _field(item: Mapping[str, Any], name: str, fits: Callable[[Any], bool], expected: str) -> Any:
    if not fits(item.get(name)):
        raise ValueError(f"{name}: {_shown(item.get(name))}: expected {expected}")
    return item[name]


def _form(place: int, data: Any) -> Form:
    if not isinstance(data, dict):
        raise ValueError(f"forms[{place}]: {_shown(data)}: expected knobs by name")
    return Form(tuple((name, _knob(f"forms[{place}].{name}", value)) for name, value in data.items()))


def _knob(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        factor = value.get("over", value.get("times"))
        if len(value) != 2 or not _is_name(value.get("pow2")) or factor is None or not _is_measure(factor):
            raise ValueError(f"{name}: {_shown(value)}: expected a size and a factor")
        return Scaled(value["pow2"], float(factor), "over" in value)
    if not isinstance(value, _PLAIN) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name}: {_shown(value)}: expected a plain value")
    return value


def _node(data: Any, forms: int, depth: int) -> Node:
    if depth > _DEEPEST or not isinstance(data, dict):
        raise ValueError(f"tree: {_shown(data)}: expected a question or a leaf, at most {_DEEPEST} deep")
    if "use" in data:
        use = data["use"]
        if not isinstance(use, list) or not all(type(i) is int and 0 <= i < forms for i in use):
            raise ValueError(f"use: {_shown(use)}: expected places in forms, below {forms}")
        return Leaf(tuple(use))
    subject = data.get("if")
    if not isinstance(subject, str):
        raise ValueError(f"if: {_shown(subject)}: expected a product of sizes, or the name of an option")
    then, otherwise = (_node(data.get(name), forms, depth + 1) for name in ("then", "else"))
    if "is" in data:
        return Split(subject, None, data["is"], then, otherwise)
    bound = _field(data, "at_most", _is_measure, "a number of 0 or more")
    _parsed(subject)
    return Split(subject, float(bound), None, then, otherwise)


def _is_known(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(values, list) for values in value.values())


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_measure(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e30


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "a number of very many digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
