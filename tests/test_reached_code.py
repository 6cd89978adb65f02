"""Digests of code that is reached in another way than by a name, and of objects that calls change."""

import pytest
from digested_code import Digest

REACHED = {
    "class attribute of a bound method": """
class Base:
    k = 1
    def f(self, x):
        return self.k * x
class Run(Base):
    k = SIZE
run = Run().f
""",
    "attribute of the object of a bound method": """
class Run:
    def __init__(self, k):
        self.k = k
    def f(self, x):
        return self.k * x
run = Run(SIZE).f
""",
    "attribute of a callable object": """
class Run:
    def __init__(self, k):
        self.k = k
    def __call__(self, x):
        return self.k * x
run = Run(SIZE)
""",
    "attribute of a callable object that a method sets before its calls": """
class Run:
    def set(self, k):
        self.k = k
    def __call__(self, x):
        self.calls = 1
        return self.k * x
run = Run()
run.set(SIZE)
""",
    "field of a callable dataclass": """
from dataclasses import dataclass
@dataclass(eq=False)
class Run:
    k: int
    calls: int = 0
    def __call__(self, x):
        self.calls += 1
        return self.k * x
run = Run(SIZE)
""",
    "class of an object that wraps a function": """
class Run:
    def __init__(self, fn):
        self.fn = fn
    def __call__(self, x):
        return SIZE * self.fn(x)
run = Run(lambda x: x)
""",
    "wrapper made without a decorator": """
from functools import wraps
def scaled(k):
    def made(f):
        @wraps(f)
        def g(x):
            return k * f(x)
        return g
    return made
def f(x):
    return x
run = scaled(SIZE)(f)
""",
    "function in the mapping of a closure": """
def f(x):
    return SIZE * x
def made(table):
    def g(x):
        return table['f'](x)
    return g
run = made({'f': f})
""",
    "object in a closure": """
class Scale:
    def __init__(self, k):
        self.k = k
def made(scale):
    def g(x):
        return scale.k * x
    return g
run = made(Scale(SIZE))
""",
    "closure that holds itself": """
def made(n):
    def g(x):
        return g(x - 1) if x else n
    return g
run = made(SIZE)
""",
    "item set after a constant": """
TABLE = {}
TABLE['k'] = SIZE
def run(x):
    return TABLE['k'] * x
""",
    "attribute set after a class": """
class Scale:
    k = 1
Scale.k = SIZE
def run(x):
    return Scale.k * x
""",
    "constant with the name of an inner parameter": """
K = SIZE
def run(x):
    def f(K):
        return K
    return f(x) * K
""",
    "global name": """
K = SIZE
def run(x):
    global K
    if x is None:
        K = 5
    return K
""",
    "element type of a parameter": """
import triton.language as tl
def run(x, n: tl.intSIZE):
    return n
""",
}
"""Code that `run` reaches in another way than by a name, with SIZE for a number."""


@pytest.mark.parametrize("text", REACHED.values(), ids=REACHED)
def test_digest_depends_on_code_reached_in_any_way_and_not_on_addresses(digest: Digest, text: str) -> None:
    one, same, other = (digest(more=text.replace("SIZE", size)) for size in ("8", "8", "16"))
    assert one == same != other


COUNTERS = {
    "number of calls": """
class Run:
    def __init__(self):
        self.calls = 0
    def __call__(self, x):
        self.calls += 1
        return x
run = Run()
""",
    "number of calls of a dataclass": """
from dataclasses import dataclass
@dataclass(eq=False)
class Run:
    calls: int = 0
    def __call__(self, x):
        self.count()
        return x
    def count(self):
        self.calls = self.calls + 1
run = Run()
""",
    "function made at the first call, by a class above": """
class Made:
    def __init__(self):
        self.made = None
    def make(self):
        self.made = lambda x: x
class Run(Made):
    def __call__(self, x):
        if self.made is None:
            self.make()
        return self.made(x)
run = Run()
""",
    "count in an object of a closure": """
class Count:
    def __init__(self):
        self.n = 0
    def up(self):
        self.n += 1
def made(count):
    def g(x):
        count.up()
        return x
    return g
run = made(Count())
""",
}


@pytest.mark.parametrize("text", COUNTERS.values(), ids=COUNTERS)
def test_digest_of_an_object_that_its_calls_change_stays(digest: Digest, text: str) -> None:
    assert digest(more=text) == digest(more=text + "run(1)\nrun(1)\n") != digest(more=text.replace(" x\n", " 2 * x\n"))
