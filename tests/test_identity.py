"""Digests of code: what leaves them as they are, and what changes them."""

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from asserting import every
from digested_code import HOST, KERNELS, Digest

from kerneltune import ops
from kerneltune.identity import code_digest


@pytest.mark.parametrize(
    "change",
    [
        ('"""Copy n elements."""', '"""Copy all elements, twice as large."""'),
        ("# element numbers", "# numbers of elements, which\n    # are many"),
        ("tl.store(y_ptr + at, _scaled(", "tl.store(\n        y_ptr + at,\n        _scaled("),
        ("_scaled", "_doubled"),
        ("WIDTH", "TILE_WIDTH"),
        ("sizes", "extents"),
        ("side", "extent"),
        ("size: int) -> int", "size)"),
        ("{x.ndim} dimensions", "{x.ndim} axes, expected 1"),
        ("_DEFAULT = 256", "_DEFAULT = 512"),
        ('"""Elements of a program."""', ""),
        ("import triton.language as tl", "from triton import language as tl"),
        ("def run(", "def unused():\n    return 1\n\n\ndef run("),
        ("x = inputs", "x: torch.Tensor = inputs"),
        ("WIDTH = 1 << 4\n", "from typing import TYPE_CHECKING\nWIDTH = 1 << 4\nif TYPE_CHECKING:\n    WIDTH: int = 16\n"),
    ],
    ids=lambda change: change[0][:20],
)
def test_digest_of_code_that_runs_the_same_stays(digest: Digest, change: tuple[str, str]) -> None:
    assert digest(change) == digest()


@pytest.mark.parametrize(
    "change",
    [
        ("1 << 4", "1 << 5"),
        ("2.0", "3.0"),
        ("x * factor", "x + factor"),
        ("tl.arange(0, BLOCK)", "tl.arange(0, 2 * BLOCK)"),
        (", at < n), 2.0)", ", at <= n), 2.0)"),
        ("BLOCK: tl.constexpr", "BLOCK"),
        ("@triton.jit\ndef _scaled", "@triton.jit(noinline=True)\ndef _scaled"),
        ("block: int = 64", "block: int = 32"),
        ("side + 1", "side + 2"),
        ("-(-size // WIDTH)", "size // WIDTH"),
        ("torch.empty_like", "torch.zeros_like"),
        ("_rows(sizes[0])", "_rows(sizes[-1])"),
    ],
    ids=lambda change: change[0][:20],
)
def test_digest_of_code_that_runs_otherwise_changes(digest: Digest, change: tuple[str, str]) -> None:
    assert digest(change) != digest()


def test_digest_does_not_depend_on_the_engine_s_wrapper(digest: Digest) -> None:
    more = "\n\ndef wrapped(inputs):\n    from kerneltune.kernel_lib.functions import MADE\n    return MADE(run)(inputs, None)\n"
    one, other = (digest(more=more.replace("MADE", name), name="wrapped") for name in ("run_of", "constant"))
    assert one == other
    assert one != digest(("2.0", "3.0"), more=more.replace("MADE", "run_of"), name="wrapped")


def test_digest_tells_parts_of_slices_and_kinds_of_parameters_apart(digest: Digest) -> None:
    """The parts of a slice, and the two kinds of further parameters, may each be missing."""
    functions = [f"\n\ndef rest({parameters}):\n    return other\n" for parameters in ("*other", "**other", "other")]
    functions += [f"\n\ndef rest(x):\n    return x[{part}]\n" for part in ("2:", ":2", "::2", "1:2", "1::2", ":1:2", "2")]
    assert len({digest(more=function, name="rest") for function in functions}) == len(functions)


def test_digest_of_code_moved_to_another_module_stays(digest: Digest) -> None:
    moved = HOST[HOST.index("@cache") : HOST.index("class Knobs")]
    there = ("WIDTH = 1 << 4\n", "WIDTH = 1 << 4\nfrom functools import cache\n" + moved)
    assert digest((moved, ""), there, ("import WIDTH, _copy", "import _rows, _copy")) == digest()


@pytest.mark.parametrize(
    "file", ["beside_{n}.py", "package_{n}/beside_{n}.py", "packages/beside_{n}.py", "site-packages/beside_{n}.py"]
)
@pytest.mark.parametrize(
    "plug_in_text",
    [
        "from {module} import scaled\n\n\ndef run(x):\n    return scaled(x)\n",
        "import {module} as other\n\n\ndef run(x):\n    return other.scaled(x)\n",
        "import {module}\n\n\ndef run(x):\n    return {module}.scaled(x)\n",
    ],
)
def test_digest_covers_modules_that_are_not_installed(
    file: str, plug_in_text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plug-in runs code of a module beside it, of a package beside it, of another folder, or of an installed package."""
    digests = []
    for number, factor in enumerate((2, 2, 3)):
        path = tmp_path / file.format(n=f"{tmp_path.name}_{number}".replace("-", "_"))
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def scaled(x):\n    return {factor} * x\n")
        is_package = path.parent.name.startswith("package_")
        monkeypatch.syspath_prepend(tmp_path if is_package else path.parent)
        module = f"{path.parent.name}.{path.stem}" if is_package else path.stem
        plug_in = tmp_path / f"plug_in_{path.stem}.py"
        plug_in.write_text(plug_in_text.format(module=module))
        monkeypatch.syspath_prepend(tmp_path)
        importlib.invalidate_caches()
        digests.append(code_digest(importlib.import_module(plug_in.stem).run))
    is_installed = "site-packages" in file
    assert digests[0] != digests[2]
    assert (digests[0] == digests[1]) is not is_installed, "of installed packages the names alone count"


def test_digest_of_a_partial_depends_on_its_arguments(digest: Digest) -> None:
    more = "\n\nfrom functools import partial\none, same, two = partial(run, {}), partial(run, {}), partial(run, {1: 2})\n"
    assert digest(more=more, name="one") == digest(more=more, name="same") != digest(more=more, name="two")


def test_digest_of_a_closure_depends_on_the_values_it_holds(digest: Digest) -> None:
    more = "\n\ndef made(n):\n    def inner(x):\n        return x + n\n    return inner\n\n\n"
    more += "one, same, two = made(1), made(1), made(2)\n"
    assert digest(more=more, name="one") == digest(more=more, name="same") != digest(more=more, name="two")


SETS = """

def partial_of(*parts):
    from functools import partial
    return partial(run, *parts)


def first(x):
    return _rows(x)


def second(x):
    return _rows(x) + 1


functions, in_other_order = partial_of({first, second}), partial_of({second, first})
fewer, sets_of_texts = partial_of({first}), partial_of({frozenset("abcdef"), frozenset("gh")})
split, whole = partial_of({1}, 2), partial_of({1, 2})
holds_itself = set()
recursive = partial_of(holds_itself)
holds_itself.add(recursive)
"""


def test_digest_of_a_set_has_the_code_of_its_functions_and_no_order(digest: Digest) -> None:
    one = digest(more=SETS, name="functions")
    assert one == digest(more=SETS, name="functions") == digest(more=SETS, name="in_other_order")
    assert one != digest(("+ 1", "+ 2"), more=SETS, name="functions")
    assert one != digest(more=SETS, name="fewer")
    assert digest(more=SETS, name="split") != digest(more=SETS, name="whole")
    assert digest(more=SETS, name="recursive") == digest(more=SETS, name="recursive")


def test_digest_of_sets_in_a_set_is_the_same_under_every_hash_seed(tmp_path: Path) -> None:
    (tmp_path / "sets.py").write_text("from functools import partial\n\ndef run(x):\n    return x\n" + SETS)
    program = "import sets; from kerneltune.identity import code_digest; print(code_digest(sets.sets_of_texts))"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parent.parent}"}
    digests = {
        subprocess.check_output([sys.executable, "-c", program], env=environment | {"PYTHONHASHSEED": seed}, cwd=tmp_path)
        for seed in "1234"
    }
    assert len(digests) == 1


def test_digest_of_a_long_chain_of_functions_needs_no_deeper_python(digest: Digest) -> None:
    chain = "".join(f"def link_{n}(x):\n    return link_{n + 1}(x)\n\n\n" for n in range(400))
    ends = [f"{chain}def link_400(x):\n    return x + {n}\n" for n in (1, 2)]
    limit = sys.getrecursionlimit()
    assert digest(more=f"\n\n{ends[0]}", name="link_0") != digest(more=f"\n\n{ends[1]}", name="link_0")
    assert sys.getrecursionlimit() == limit


@dataclass
class Adds:
    by: object

    def __call__(self, x: float) -> Any:
        return x + self.by  # type: ignore[operator]


@dataclass(frozen=True)
class Scales:
    by: object

    def __call__(self, x: float) -> Any:
        return x * self.by  # type: ignore[operator]


def test_digest_tells_equal_callables_of_other_types_apart() -> None:
    assert len({code_digest(Scales(by)) for by in (1, True, 1.0)}) == 3


def test_digest_of_an_object_without_a_hash_has_its_values() -> None:
    assert code_digest(Adds(1)) == code_digest(Adds(1)) != code_digest(Adds(2))


def test_digest_of_a_function_of_torch_has_its_name_alone() -> None:
    import torch

    assert code_digest(functools.partial(torch.nn.functional.softmax, dim=0)) != code_digest(torch.nn.functional.relu)
    assert code_digest(torch.nn.Linear) == code_digest(torch.nn.Linear(2, 2))


def test_digest_follows_names_that_a_star_imports(digest: Digest) -> None:
    star = ("from .kernels import WIDTH, _copy", "from .kernels import WIDTH, _copy\nfrom .kernels import *")
    more = ("WIDTH = 1 << 4\n", "WIDTH = 1 << 4\ndef halved(n):\n    return n // 2\n")
    used = ("-(-size // WIDTH)", "halved(size)")
    assert digest(star, more, used) == digest(star, more, used) != digest(star, more, used, ("n // 2", "n // 3"))


def test_digest_of_code_without_a_file_names_the_module() -> None:
    names: dict[str, Any] = {"__name__": "no_such_module_here"}
    exec("def run():\n    return 1\n", names)
    with pytest.raises(ValueError, match="module 'no_such_module_here': no source file"):
        code_digest(names["run"])


MADE = """
import marshal
from dataclasses import dataclass
from functools import wraps


@dataclass(frozen=True)
class Step:
    by: int

    def taken(self, x):
        return x + 1


def same(function):
    @wraps(function)
    def called(x):
        return function(x)

    return called


@same
def kept(x):
    return x


def listed(x):
    'The constants of the branches are all that tells the order of the branches.'
    return None if x in {8, 0} else 5


listed.__code__ = marshal.loads(marshal.dumps(listed.__code__))  # as of a .pyc file, whose sets are in another order
"""


@pytest.mark.parametrize(
    ("edit", "is_refused"),
    [
        (lambda text: text, False),
        (lambda text: f"# a comment\n{text}", False),
        (lambda text: text.replace("2.0", "3.0"), True),
        (lambda text: text.replace("n, BLOCK", "n, ROWS, BLOCK"), True),
        (lambda text: text.replace("return x + 1", "return x + 2"), True),
        (lambda text: text.replace("{8, 0}", "{8, 1}"), True),
        (lambda text: text.replace("None if x in {8, 0} else 5", "5 if x in {8, 0} else None"), True),
    ],
)
def test_digest_of_a_file_edited_after_its_import_is_refused(
    edit: Callable[[str], str], is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"edited_{tmp_path.name}"
    path = tmp_path / f"{name}.py"
    path.write_text(KERNELS + MADE)
    monkeypatch.syspath_prepend(str(tmp_path))
    kernel = vars(importlib.import_module(name))["_copy"]
    path.write_text(edit(KERNELS + MADE))
    if is_refused:
        with pytest.raises(
            ValueError, match=rf"{path}: (_copy|Step.taken|listed): edited after it was imported: start a new process$"
        ):
            code_digest(kernel)
    else:
        assert len(code_digest(kernel)) == 12


def test_digest_of_every_variant_has_12_characters() -> None:
    digests = {(op.name, variant.name): variant.source_hash for op in ops.load().values() for variant in op.variants}
    assert every(len(text) == 12 for text in digests.values())
    assert code_digest(functools.partial(len, ())) != code_digest(functools.partial(len, (1,)))


NESTED = """
def make(width, mark, room):
    first = lambda x: x + width

    def second(x):
        return f"{x:{mark}{room}}"

    return first, second
"""
GOLDEN = ["04c56ebfa39a", "c8ba3a374826"]


def test_digest_of_a_nested_function_is_the_same_under_every_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests are equal under Python 3.11, 3.12 and 3.13, whose bytecode and trees of f-strings differ."""
    (tmp_path / "nested_functions.py").write_text(NESTED)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("nested_functions")
    assert [code_digest(function) for function in module.make(1, "<", 8)] == GOLDEN
    assert code_digest(module.make(2, "<", 8)[0]) != GOLDEN[0]
