"""Write the generated pages: the command reference from Typer, results from records, the list of modules from docstrings."""

import ast
import contextlib
import io
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "results" / "nvidia_h200"
TITLES = {
    "rmsnorm": "RMSNorm", "fp8_rowwise": "FP8 row-wise quantization", "fp8_tensorwise": "FP8 tensor-wise quantization",
    "fp8_weights": "FP8 casts of expert weights", "fp8_groups": "FP8 casts of token groups", "fp8_transpose": "FP8 transpose",
    "fp8_grouped_gemm": "FP8 grouped product", "multi_cast": "Casts of many weights", "weight_only": "int4 and fp8 products",
    "int4_fp8": "int4 weights on fp8 tensor cores", "int4_static": "int4 weights, static scale of x",
    "int4_experts": "Experts with int4 weights",
    "moe_training": "Training steps of experts", "moe_routing": "Routing of tokens", "swiglu_bwd": "Gradient of SwiGLU",
    "fp8_swiglu": "SwiGLU and its FP8 cast",
    "model_training": "Training steps of models", "decode": "Decoding steps with int4 weights",
}  # fmt: skip


TABLES = re.compile(r"\]\(\.\./((?:\.\./)*results)/nvidia_h200(?:/(\w+\.md))?\)")
"""Links to tables in the repository, which the site shows as pages of its own."""
WIDE = "---\nhide:\n  - toc\n---\n\n"
"""Front matter of pages whose tables need the room of the table of contents."""
AGAINST = {"--family": "Against the fastest peer", "baseline": "Against the baseline"}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    files.append(File.generated(config, "commands.md", content=commands()))
    families = sorted(path.stem for path in RECORDS.glob("*.jsonl"))
    for family in families:
        files.append(File.generated(config, f"results/{family}.md", content=results(family)))
    files.append(File.generated(config, "results/index.md", content=index(families)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the list of modules where a page asks for it, and turn links to the repository's tables into links to the site's."""
    markdown = TABLES.sub(lambda link: f"]({link[1]}/{link[2] or 'index.md'})", markdown)
    return markdown.replace("<!-- modules -->", modules()) if "<!-- modules -->" in markdown else markdown


def modules() -> str:
    """Return a table of the package's modules but operators and their kernels: the first lines of their docstrings."""
    rows = ["| module | |", "|---|---|"]
    for path in sorted((ROOT / "kerneltune").rglob("*.py")):
        name = str(path.relative_to(ROOT / "kerneltune"))
        if not name.startswith("ops/") and not path.stem.startswith("__"):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            rows.append(f"| `{name}` | {text.partition(chr(10))[0].replace('|', '&#124;')} |")
    return "\n".join(rows)


def commands() -> str:
    """Return the command reference in Markdown."""
    from kerneltune.cli import app

    command = typer.main.get_command(app)
    _shown(command)
    context = command.make_context("kerneltune", ["doctor"], resilient_parsing=True)
    text = get_docs_for_click(obj=command, ctx=context, name="kerneltune", title="Commands")
    return str(text).replace("<", "&lt;").replace(">", "&gt;") if "<" in str(text) else str(text)


def _shown(group: Any) -> None:
    """Leave out the hidden commands of a group, and let the list say the whole first sentence of each."""
    group.commands = {name: each for name, each in group.commands.items() if not each.hidden}
    for command in group.commands.values():
        command.short_help = re.split(r"(?<=[.:])\s", command.help or "", maxsplit=1)[0].rstrip(":.") + "."
        if hasattr(command, "commands"):
            _shown(command)


def results(family: str) -> str:
    """Return the page of a family: summaries and tables against the fastest peer and `baseline`, each with its command.

    A workload shows the table that it declares.
    """
    commands = [["compare", "--family", family], ["compare", "baseline", "optimized", "--family", family]]
    title = TITLES.get(family, family.replace("_", " "))
    parts = [f"{WIDE}# {title}"]
    bodies = {""}
    for command in commands:
        text = _printed(*command, "--format", "markdown").rstrip()
        heading = f"## {AGAINST[command[1]]}"
        _, _, body = text.partition("\n")
        if body not in bodies:  # if the baseline is the only peer, the tables differ in their first line alone
            bodies.add(body)
            parts += [heading, f"Printed by `kerneltune {' '.join(command)} --format markdown`:", text]
    return "\n\n".join(parts) + "\n"


def index(families: list[str]) -> str:
    """Return the list of the families: speed-up, slowest row, and the page of each."""
    from kerneltune.records import load
    from kerneltune.reporting.pairing import default_pair
    from kerneltune.reporting.tables import families_table

    records = {family: [r for r in load(RECORDS / f"{family}.jsonl") if r.role != "part"] for family in families}
    table = families_table(records, {family: default_pair(members) for family, members in records.items()}).markdown()
    for family in families:
        table = table.replace(f"| {family} |", f"| [{TITLES.get(family, family)}]({family}.md) |", 1)
    lines = [f"{WIDE}# Results", "", "Recorded on NVIDIA H200s, cold L2, CUDA graphs, variants of a run interleaved.", ""]
    lines += [
        "Speed-up: geometric mean of B over A in the rows that both were measured in. Rows of another A are not pooled.",
        "",
    ]
    return "\n".join([*lines, table, "What was tried and lost, with figures: [notes](../notes/index.md)."])


def _printed(*arguments: str) -> str:
    """Return the output of a command."""
    from typer.testing import CliRunner

    from kerneltune.cli import app

    with contextlib.redirect_stderr(io.StringIO()):
        done = CliRunner().invoke(app, list(arguments))
    return done.stdout if done.exit_code == 0 else ""
