"""`kerneltune cases`: write the sweep of every operator that a model uses."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kerneltune.cli import options as o
from kerneltune.cli.console import deliver, note
from kerneltune.files import replace_text
from kerneltune.task import runs_folder

_MOST_TOKENS = 1 << 24

ModelFile = Annotated[Path, o.option("--model", "FILE", "A Hugging Face config.json, or the folder that has one.")]
Ep = Annotated[int, o.count("--ep", "GPUs that share the experts of a layer.")]


@dataclass(frozen=True)
class Work:
    """Hold the options that say with what a model works."""

    tokens: Annotated[str, o.option("--tokens", "N1,N2", "Tokens that a GPU trains on at a time.")] = "4096,32768"
    ep: Ep = 1
    batch: Annotated[str, o.option("--batch", "N1,N2|none", "Tokens of a decoding step, for int4 products.")] = "1,16,64"


@o.ungrouped()
def command(model: ModelFile, work: Work, output: o.Output = None) -> None:
    """Write the sweep of every operator that a model uses, its cases named by layer, for `tune`, `sweep` and `compare`.

    The sweep has norms, products of experts with the casts of their operands, routing, SwiGLU, and int4 products of dense layers,
    where N is the tokens and M the features; it has no casts of dense layers in fp8. FILE may be of a dense or of a
    mixture-of-experts language model.
    """
    deliver(text(model, work), output)


def write_sweep(results: Path, model: Path, work: Work) -> Path:
    """Write the sweep of a model for a run, print the facts of the model, and return the path."""
    sweep = text(model, work)
    _, read_as, family, *_ = sweep.splitlines()
    note(f"{model}: {read_as.removeprefix('# ')}")
    path = runs_folder(results, "models") / f"{family.removeprefix('family: ')}.yaml"
    replace_text(path, sweep)
    return path


def text(model: Path, work: Work) -> str:
    """Return the sweep file of a model."""
    from kerneltune.workloads.model_cases import model_sweep_text
    from kerneltune.workloads.model_config import read

    counts = sizes_of("tokens", work.tokens)
    batches = [] if work.batch == "none" else sizes_of("batch", work.batch)
    config = read(model)
    if work.ep > 1 and config.experts is None:
        raise ValueError(f"ep: {work.ep}: expected 1, as {config.path} has no experts")
    return model_sweep_text(config, counts, batches, work.ep)


def sizes_of(field: str, text: str) -> list[int]:
    """Parse numbers separated by commas, each once."""
    parts = text.split(",")
    if not all(re.fullmatch(r"[1-9][0-9]{0,8}", part) and int(part) <= _MOST_TOKENS for part in parts):
        raise ValueError(f"{field}: {text[:60]!r}: expected integers from 1 to {_MOST_TOKENS}, such as {Work.tokens}")
    return [int(part) for part in dict.fromkeys(parts)]
