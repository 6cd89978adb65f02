"""A package of a kernel and its host code, of which tests change a part and take the digest."""

import importlib
from collections.abc import Callable
from pathlib import Path

from kerneltune.identity import code_digest

KERNELS = '''"""Device code."""
import triton
import triton.language as tl

WIDTH = 1 << 4


@triton.jit
def _scaled(x, factor):
    return x * factor


@triton.jit
def _copy(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """Copy n elements."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # element numbers
    tl.store(y_ptr + at, _scaled(tl.load(x_ptr + at, at < n), 2.0), at < n)
'''
HOST = '''"""Host code."""
from functools import cache

import torch

from .kernels import WIDTH, _copy
from kerneltune.cache import Chooser

_DEFAULT = 256
_choose = Chooser("copy", lambda _case: _DEFAULT, "cold", None)


@cache
def _rows(size: int) -> int:
    """Return the number of rows."""
    return -(-size // WIDTH)


class Knobs:
    """Knobs of the copy."""

    block: int = 64
    """Elements of a program."""


def run(inputs, config):
    """Launch the copy."""
    x = inputs["x"]
    if config is None:
        config = _choose((("N", x.numel()),), "bfloat16")
    if x.ndim != 1:
        raise ValueError(f"x has {x.ndim} dimensions")
    sizes = [side + 1 for side in x.shape]
    _copy[(_rows(sizes[0]),)](x, torch.empty_like(x), x.numel(), BLOCK=config.block or Knobs.block)
'''


Digest = Callable[..., str]


def digests_in(folder: Path) -> Digest:
    """Return a function that writes both files as a package of a new name, with replacements made, and returns a digest."""
    count = iter(range(1000))

    def digest_of(*changes: tuple[str, str], more: str = "", name: str = "run") -> str:
        package = folder / f"{folder.name}_{next(count)}".replace("-", "_")
        package.mkdir()
        (package / "__init__.py").touch()
        for file, text in (("kernels", KERNELS), ("host", HOST + more)):
            for before, after in changes:
                text = text.replace(before, after)
            (package / f"{file}.py").write_text(text)
        importlib.invalidate_caches()
        return code_digest(getattr(importlib.import_module(f"{package.name}.host"), name))

    return digest_of
