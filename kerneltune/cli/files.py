"""Files that commands read when they are not told which."""

from pathlib import Path

from kerneltune.cli import options as o
from kerneltune.cli.console import note
from kerneltune.errors import meant


def curve_files(results: Path | None) -> list[Path]:
    """Files of training curves on this GPU, else on any."""
    from kerneltune import device

    here = device.current()
    return sorted(o.results_root(results).glob(f"{here.slug if here.is_gpu else '*'}/curves/*.csv"))


def record_files(results: Path | None, family: str | None = None) -> list[Path]:
    """Record files of this GPU; where there is no GPU, of any, and a remark that says so.

    Raises:
        ValueError: there are none.
    """
    from kerneltune import device, sweep

    root = sweep.results_root(results, family)
    here = device.current()
    pattern = f"{here.slug if here.is_gpu else '*'}/{family or '*'}.jsonl"
    files = [path for path in sorted(root.glob(pattern)) if path.parent.name not in (device.INTERPRETER, "runs")]
    if not files:
        place = f"of {here.name} in" if here.is_gpu else "of any GPU in"
        others = dict.fromkeys(path.stem for folder in (root, sweep.results_root(results)) for path in folder.glob("*/*.jsonl"))
        raise ValueError(f"no records {place} {root / pattern}: run a sweep first, or name a file{meant(family, others)}")
    if not here.is_gpu:
        folders = ", ".join(str(folder) for folder in dict.fromkeys(path.parent for path in files))
        note(f"no GPU here: recorded results from {files[0] if len(files) == 1 else f'{len(files)} files of {folders}'}")
    return files
