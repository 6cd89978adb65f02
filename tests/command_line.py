"""Commands run in this process, and records for them."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

from literal_records import literal
from typer.testing import CliRunner, Result

from kerneltune import cache
from kerneltune.cli import app
from kerneltune.records import Record


def run(*arguments: str | Path) -> Result:
    """Run a command whose settings, such as the folder of configs, end with it."""
    with mock.patch.dict(os.environ):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    cache.clear()
    return result


def refused(*arguments: str | Path) -> str:
    """Return the one line that a command says before it exits with 2, having printed nothing else."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr.removesuffix("\n")


def record(us: float = 100.0, **changes: Any) -> Record:
    """Return a record of a family, with a share of the ceiling and a noise floor."""
    more = {
        "gbps": 100_000 / us,
        "pct_ceiling": 50.0,
        "aa_floor": 0.01,
        "torch": "2.13",
        "triton": "3.7",
        "family": "rmsnorm",
        "role": "own",
    }
    return literal(us, **more | changes)


def both(baseline_us: float = 100.0, optimized_us: float = 50.0, **changes: Any) -> list[Record]:
    return [record(baseline_us, **changes), record(optimized_us, variant="optimized", **changes)]


def operators() -> list[str]:
    from kerneltune.cli.loading import load_ops

    return list(load_ops())
