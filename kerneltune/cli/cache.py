"""`kerneltune cache`: what the config cache holds, and whether it is sound."""

from pathlib import Path
from typing import Annotated

import typer

from kerneltune.cli import options as o
from kerneltune.cli.console import show, show_table

app = typer.Typer(no_args_is_help=True, help="Show and check the cached configs.")


@app.command("list")
def list_(configs: o.Configs = None) -> None:
    """One line per GPU and operator."""
    from kerneltune.cache import load

    rows = []
    for path in _files(configs):
        entries = load(path.stem, path.parent.name, path.parent.parent)
        variants = ", ".join(sorted({entry.variant for entry in entries}))
        latest = max((str(entry.evidence.get("date", "")) for entry in entries), default="")
        rows.append((path.parent.name, path.stem, str(len(entries)), variants, latest))
    if rows:
        show_table(("gpu", "op", "entries", "variants", "latest"), rows)
    else:
        show(f"no entries in {o.configs_root(configs)}")


@app.command("show")
def show_(
    op: Annotated[str, typer.Argument(metavar="OP", help="Name of an operator.")],
    gpu: Annotated[str | None, typer.Option("--gpu", help="Only this GPU, as its folder is called.")] = None,
    configs: o.Configs = None,
) -> None:
    """The cached configs of one operator."""
    from kerneltune.cache import load

    files = _files(configs)
    o.choice("op", op, sorted({path.stem for path in files}))
    if gpu is not None:
        o.choice("gpu", gpu, sorted({path.parent.name for path in files if path.stem == op}))
    rows = []
    for path in files:
        if path.stem != op or gpu not in (None, path.parent.name):
            continue
        for entry in load(op, path.parent.name, path.parent.parent):
            case = [entry.case, *(f"{name}={value}" for name, value in (*entry.axes, *entry.options))]
            config = " ".join(f"{knob}={value}" for knob, value in entry.config.items())
            speedup = entry.evidence.get("speedup")
            gain = f"{speedup:.2f}x" if isinstance(speedup, float | int) else ""
            rows.append((path.parent.name, entry.variant, " ".join(case), entry.dtype, entry.quant, entry.policy, config, gain))
    show_table(("gpu", "variant", "case", "dtype", "quant", "policy", "config", "speedup"), rows)


@app.command()
def check(configs: o.Configs = None) -> None:
    """Read every file strictly; exit code 2 and the reason at the first broken entry."""
    from kerneltune.cache import load_strict

    files = _files(configs)
    known = o.load_ops() if files else {}
    entries = 0
    for path in files:
        if path.stem not in known:
            raise ValueError(f"{path}: op: {path.stem!r}: expected one of {', '.join(known)}")
        for index, entry in enumerate(load_strict(path)):
            try:
                known[path.stem].variant(entry.variant).config_from(entry.config)
            except ValueError as error:
                raise ValueError(f"{path}: entries[{index}]: {error}") from error
            entries += 1
    show(f"{entries} entries in {len(files)} files of {o.configs_root(configs)} are good")


def _files(configs: Path | None) -> list[Path]:
    return sorted(o.configs_root(configs).glob("*/*.json"))
