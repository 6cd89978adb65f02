"""README and docs: every fenced block is run, parsed or loaded; links lead somewhere; the site builds.

A cheap command that needs no GPU runs; any other command is parsed, and its files, families, operators and variants must exist.
`NOT_RUN` lists commands that are neither run nor parsed, with reasons.
"""

import ast
import fnmatch
import importlib
import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from asserting import every
from doc_blocks import (
    PAGES,
    ROOT,
    Block,
    Command,
    all_options,
    blocks,
    indented_commands,
    inline_commands,
    install,
    known_options,
    options_in_prose,
    parsed,
    prose,
    write_files,
)
from typer.testing import CliRunner
from warm_python import python

from kerneltune import ops, workloads
from kerneltune.cache import CacheEntry, store
from kerneltune.cli import app, console, settings
from kerneltune.spec import Case
from kerneltune.sweep_file import families

README, GUIDE = ROOT / "README.md", ROOT / "docs" / "your_own_kernel.md"
LANGUAGES = {"console", "sh", "python", "yaml", "toml", "json", "text"}
NOT_RUN = {
    "pip install git+https://github.com/kerneltune/kerneltune": "installs from the network",
    'git tag --annotate vX.Y.Z --cleanup=whitespace --file <(echo "kerneltune X.Y.Z"; echo; make -s notes)': "makes a tag",
    ". .venv/bin/activate": "changes the shell",
    "git push origin vX.Y.Z": "writes to a server",
    "cli/ a file per command, and what commands share; prints": "text: the folders",
    "command decides, stores, prints": "text: the processes",
    "kernel classes launches time % configs key key leaves out": "text: output of a GPU",
    "launch author's first µs ours µs speedup 95 % config": "text: output of a GPU",
    "verdict case M K variant µs slowdown 95 % interval": "text: output of records that a GPU made",
}
OPTIONS_OF_SCRIPTS = {"--from", "--sizes", "--worst"}
"""Options of examples and benchmarks that pages name."""
FAST = {"adopt lint", "adopt list", "cache explain", "cache import", "capture", "cases", "compare", "inspect", "ops", "report"}
"""Commands that need no GPU and take little; `sweep` as well where it only checks."""
FINDS = {"adopt lint"}
"""Commands that exit with 1 on the example that they are run on."""
MODEL = {
    "model_type": "qwen3_moe", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 2,
}  # fmt: skip
TWO_KERNELS = ROOT / "examples" / "two_kernels" / "two_kernels.py"
READERS = {
    "config.json": lambda: json.dumps(MODEL),
    "train.py": TWO_KERNELS.read_text,
    "double.py": lambda: next(block.text for block in blocks(README) if block.kind == "python"),
    "swiglu.py": lambda: guide_file("swiglu.py"),
    "swiglu.yaml": lambda: guide_file("swiglu.yaml"),
    "base.jsonl": lambda: "",
    "baseline.jsonl": lambda: "",
    "table.json": lambda: next(block.text for block in blocks(ROOT / "docs" / "untuned_shapes.md") if block.kind == "json"),
}
"""Files that pages take for granted."""
MADE_ON_A_GPU = {"results/nvidia_h200/swiglu.jsonl"}
PLACEHOLDERS = {"BASELINE", "REV"}
WRITTEN = {"annotations", "configs", "csv", "junit", "markdown", "out", "output", "page", "png", "results", "save", "svg"}
"""Parameters whose files a command makes."""
EXISTING = re.compile(r".*\.(?:jsonl?|ya?ml|py)")
DIGEST = re.compile(r"-[0-9a-f]{8}\b")
"""The digest of a kernel's source and configs, in names of captured kernels."""
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def guide_file(name: str) -> str:
    """Return a file of the guide to operators, which other pages take for granted."""
    return next(block.text for block in blocks(GUIDE) if block.file_name == name)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Enter a folder as a reader has it, without a GPU, at 80 columns; forget what commands import from there."""
    for name, text in READERS.items():
        (tmp_path / name).write_text(text())
    shutil.copytree(ROOT / "results" / "nvidia_h200", tmp_path / "results" / "nvidia_h200", copy_function=os.symlink)
    for name in ("KERNELTUNE_PLUGINS", "KERNELTUNE_CONFIGS", "KERNELTUNE_RESULTS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # so that it is removed again behind a test that sets it
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(console.console, "width", 80)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    ops.load_with.cache_clear()  # of operators that the page installed
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU prints")
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.kind in ("sh", "console") for b in blocks(page))], ids=named)
def test_command_of_a_page_runs_or_parses(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write_files(page, folder)
    operators = installed(page, folder, monkeypatch)
    for block in blocks(page):
        if block.file_name == "pyproject.toml":
            operators = installed(page, folder, monkeypatch, entry_points=True)
        for command in block.commands():
            if command.words[0] == "kerneltune":
                tell(command, folder, operators, capfd)
            elif command.words[0] == "make":
                targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
                assert command.words[1] in targets, command
            elif command.words[0] == "python" and command.words[1].startswith("benchmarks/"):
                assert (ROOT / command.words[1]).is_file(), command
            elif command.words[0] == "python":
                runpy.run_path(command.words[1], run_name="__main__")
                assert capfd.readouterr().out
            else:
                assert command.line in NOT_RUN, f"{block.place}: {command.line}: neither run nor parsed"


def installed(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, entry_points: bool = False) -> set[str]:
    """Return the operators that commands may name; with `entry_points`, install the page's package first."""
    if entry_points:
        install(folder)
    else:
        shutil.rmtree(next(folder.glob("*.dist-info"), folder / "none"), ignore_errors=True)
    own = {
        name for block in (*blocks(page), *blocks(GUIDE)) for name in re.findall(r'^ +name="(\w+)",$', block.text, re.MULTILINE)
    }
    return {*ops.summaries(), *workloads.summaries(), *own}


def tell(command: Command, folder: Path, operators: set[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Parse a command of kerneltune, look up the names that it uses, and run it if that is cheap."""
    where = f"{command.block.place}: {command.line}"
    try:
        name, values = parsed(command.words[1:])
    except Exception as error:
        pytest.fail(f"{where}: {getattr(error, 'format_message', error.__str__)()}")
    assert not unknown(values, folder, operators), where
    if not ((name in FAST and not values.get("run")) or (name == "sweep" and values["check_only"])):
        assert command.output is None, f"{where}: shows output that is not compared"
        return
    words = [python() if word == "python" else word for word in command.words[1:]]
    ops.load_with.cache_clear()  # other plug-ins than those of the command before
    done = CliRunner().invoke(app, words, env=command.environment)
    os.environ.pop("KERNELTUNE_PLUGINS", None)
    assert done.exit_code == (name in FINDS), f"{where}: {done.output}"
    assert max(map(len, done.stdout.splitlines()), default=0) <= 80 or name == "cases", where
    text = capfd.readouterr().out + done.stdout + done.stderr  # of the program that a capture runs, too
    printed, wanted = ([DIGEST.sub("-", line.rstrip()) for line in lines] for lines in (text.splitlines(), command.output or []))
    assert any(printed[at : at + len(wanted)] == wanted for at in range(len(printed))), f"{where}:\n{text}"


def unknown(values: dict[str, Any], folder: Path, operators: set[str]) -> list[str]:
    """Return the families, operators, variants and files that a command names and nobody has."""

    def all_of(*names: str) -> list[str]:
        values_of = [values.get(name) for name in names]
        return [str(item) for value in values_of if value for item in (value if isinstance(value, list | tuple) else [value])]

    variants = {v.name for listed in (ops.summaries(), workloads.summaries()) for op in listed.values() for v in op.variants}
    wrong = [f"operator {name}" for name in all_of("op", "ops") if name not in operators]
    wrong += [f"variant {name}" for name in all_of("variant") if not fnmatch.filter(variants, name)]
    for family in filter(None, (values.get("family"), values.get("run") if isinstance(values.get("run"), str) else None)):
        if family not in families() and not EXISTING.fullmatch(family) and not (folder / family).is_dir():
            wrong.append(f"family {family}")
    for path in all_of(*(values.keys() - WRITTEN)):
        if EXISTING.fullmatch(path) and not (folder / path).exists() and path not in MADE_ON_A_GPU:
            wrong.append(f"file {path}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_block_of_a_page_has_a_language_and_loads(page: Path, folder: Path) -> None:
    assert not indented_commands(page), "a command outside of a fence"
    assert options_in_prose(page) - OPTIONS_OF_SCRIPTS <= all_options()
    assert not [(text, wrong) for text in inline_commands(page) if (wrong := known_options(text.split()[1:]))]
    for block in blocks(page):
        assert block.kind in LANGUAGES, f"{block.place}: no language"
        if block.kind in PROBLEMS:
            assert PROBLEMS[block.kind](block) == [], block.place


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_script_in_prose_exists_and_takes_its_options(page: Path) -> None:
    for code in map(str.split, re.findall(r"`([^`]+)`", prose(page))):
        script = next((word for word in code if re.fullmatch(r"(?:benchmarks|examples|tests)/[\w/]+\.py", word)), None)
        if script:
            text = (ROOT / script).read_text(encoding="utf-8")
            assert [word for word in code if word.startswith("--") and f'"{word}"' not in text] == [], " ".join(code)
        elif len(code) > 1 and re.fullmatch(r"\w+\.py", code[0]):
            text = (ROOT / "examples" / "adopted_packages" / code[0]).read_text(encoding="utf-8")
            assert [word for word in code if word.startswith("--") and f'"{word}"' not in text] == [], " ".join(code)


def python_problems(block: Block) -> list[str]:
    """Return imports that fail, attributes of modules that are not there, and calls that do not fit the signature."""
    tree = ast.parse(block.text)
    compile(tree, block.place, "exec")
    own = {one.file_name.removesuffix(".py") for one in blocks(block.page) if one.file_name}
    bound: dict[str, Any] = {}
    wrong = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = importlib.import_module(alias.name)
                bound[alias.asname or alias.name.split(".")[0]] = (
                    module if alias.asname else sys.modules[alias.name.split(".")[0]]
                )
        elif isinstance(node, ast.ImportFrom) and node.module not in own:
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                bound[alias.asname or alias.name] = getattr(module, alias.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (target := resolved(node.value, bound)) is not None and inspect.ismodule(target):
            wrong += [] if hasattr(target, node.attr) else [f"line {node.lineno}: no {ast.unparse(node)}"]
        elif isinstance(node, ast.Call) and (problem := call_problem(resolved(node.func, bound), node)):
            wrong.append(f"line {node.lineno}: {ast.unparse(node.func)}: {problem}")
    return wrong


def resolved(node: ast.expr, bound: dict[str, Any]) -> Any:
    """Return the object that a dotted name of imported modules stands for; None for another expression."""
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute) and inspect.ismodule(owner := resolved(node.value, bound)):
        return getattr(owner, node.attr, None)
    return None


def call_problem(function: Callable[..., Any] | None, call: ast.Call) -> str:
    """Return why arguments do not fit one of our functions or classes; empty where they do."""
    if function is None or not str(getattr(function, "__module__", "")).startswith("kerneltune"):
        return ""
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(word.arg is None for word in call.keywords):
        return ""
    try:
        inspect.signature(function).bind(*call.args, **{str(word.arg): word.value for word in call.keywords})
    except TypeError as error:
        return str(error)
    return ""


def gate_of_action(inputs: dict[str, str]) -> list[str]:
    """Return the arguments of kerneltune that `action.yml` runs with these inputs.

    `--plugin` comes first, as kerneltune itself moves it.
    """
    run = ["--run", inputs["run"]] if "run" in inputs else []
    words = ["gate", inputs["baseline"], *filter(None, [inputs.get("new")]), *run, *inputs.get("arguments", "").split()]
    return sorted(words, key=lambda word: not word.startswith("--plugin="))


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles on a machine without a GPU")
def test_steps_of_the_static_gate_fail_for_narrower_accesses_only(folder: Path) -> None:
    """Follow the job: inspect the checkout of the base, then run the gate in the checkout of the pull request."""
    (text,) = (block.text for block in blocks(ROOT / "docs" / "gate.md") if block.kind == "yaml" and "--static" in block.text)
    (job,) = yaml.safe_load(text)["jobs"].values()
    base, head = folder / job["steps"][1]["with"]["path"], folder
    base.mkdir()
    (inspects,) = (step for step in job["steps"] if step.get("run", "").startswith("kerneltune inspect"))
    (action,) = (step for step in job["steps"] if "arguments" in step.get("with", {}))
    source = (head / "swiglu.py").read_text()
    (base / "swiglu.py").write_text(source)
    case = Case("ffn-4096", (("M", 4096), ("N", 14336)), "bfloat16", "none")
    entry = CacheEntry(op="swiglu", variant="optimized", case=case, policy="cold", config={"block": 1024, "warps": 4})
    for side in (base, head):
        store("nvidia_h200", entry, side / "configs")

    def kerneltune(where: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
        command = [python(), "-m", "kerneltune", *words]
        return subprocess.run(command, cwd=where, env={**os.environ, **job["env"]}, capture_output=True, text=True, timeout=800)

    assert inspects["working-directory"] == base.name
    done = kerneltune(base, inspects["run"].split()[1:])
    assert done.returncode == 0, done.stderr
    gate = gate_of_action(action["with"])
    done = kerneltune(head, gate)
    assert (done.returncode, "; 1 compared, 0 new, 0 gone" in " ".join(done.stdout.split())) == (0, True), done
    narrowed = source.replace("_ptr + offsets, mask=mask, other", "_ptr + offsets * tl.num_programs(1), mask=mask, other")
    assert narrowed != source
    (head / "swiglu.py").write_text(narrowed)
    done = kerneltune(head, gate)
    assert (done.returncode, "bits wide, were" in " ".join(done.stdout.split())) == (1, True), done


def yaml_problems(block: Block) -> list[str]:
    """Load a sweep, a workflow or its steps, or hooks of pre-commit; a sweep is also read by the commands of its page."""
    content = yaml.safe_load(block.text)
    if isinstance(content, dict) and "family" in content:
        used = [c.line for b in blocks(block.page) for c in b.commands() if str(block.file_name) in c.line]
        return [] if used else ["a sweep that no command of the page reads"]
    wrong: list[str] = []
    inputs = yaml.safe_load((ROOT / "action.yml").read_text())["inputs"]
    Path("configs").mkdir(exist_ok=True)  # which the repository of a workflow holds
    steps = [step for job in content["jobs"].values() for step in job["steps"]] if isinstance(content, dict) else content
    for step in steps:
        if "repo" in step:
            for hook in step["hooks"]:
                parsed(hook["entry"].split()[1:])
                wrong += sorted(hook.keys() - {"id", "name", "entry", "language", "files", "pass_filenames"})
        elif step.get("uses") == "./" or step.get("uses", "").startswith("kerneltune/"):
            wrong += sorted(step["with"].keys() - inputs.keys())
            wrong += sorted(name for name, about in inputs.items() if about.get("required") and name not in step["with"])
            parsed(gate_of_action(step["with"]))
        elif "run" in step:
            for line in step["run"].splitlines():
                if line.startswith("kerneltune "):
                    parsed(line.split()[1:])
        elif not step["uses"].startswith(("actions/checkout@", "actions/upload-artifact@")):
            wrong.append(step["uses"])
    return wrong


def toml_problems(block: Block) -> list[str]:
    """Read a block as the settings of the current folder's pyproject.toml."""
    Path("pyproject.toml").write_text(block.text)
    settings.apply()
    return []


def text_problems(block: Block) -> list[str]:
    return [] if first_line(block) in NOT_RUN else [first_line(block)]


def first_line(block: Block) -> str:
    return " ".join(block.text.partition("\n")[0].split())


PROBLEMS = {"python": python_problems, "yaml": yaml_problems, "toml": toml_problems, "text": text_problems}


def test_exceptions_of_these_tests_all_occur_in_a_page() -> None:
    all_blocks = [block for page in PAGES for block in blocks(page)]
    lines = {command.line for block in all_blocks for command in block.commands()}
    assert NOT_RUN.keys() <= lines | set(map(first_line, all_blocks))
    everything = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert every(name in everything for name in {*READERS, *MADE_ON_A_GPU, *PLACEHOLDERS})


def test_python_reference_names_existing_objects_only() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for target, members in re.findall(r"^::: (\S+)\n(?:    options: \{ members: \[(.*)\] \})?", text, re.MULTILINE):
        module, _, name = target.rpartition(".")
        documented = importlib.import_module(target) if not members and "." not in target else None
        try:
            documented = importlib.import_module(target)
        except ModuleNotFoundError:
            documented = getattr(importlib.import_module(module), name)
        missing = [member for member in filter(None, members.split(", ")) if not hasattr(documented, member)]
        assert not missing, f"{target}: {missing}"


def test_readme_names_the_file_of_tested_versions() -> None:
    assert "`pip install -c constraints.txt -e .`" in README.read_text(encoding="utf-8")
    assert (ROOT / "constraints.txt").is_file()


def test_python_reference_says_where_the_docstrings_are() -> None:
    first = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").split("\n\n")[1]
    assert "`mkdocs build`" in first
    assert "`python -m pydoc " in first


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs Triton's interpreter")
def test_readme_example_runs_without_a_gpu(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path("double.py", run_name="__main__")
    assert capfd.readouterr().err == ""


def test_architecture_names_modules_and_functions_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    modules = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("kerneltune/**/*.py")}
    missing = [
        name
        for name in re.findall(r"`([\w/]+\.py)`", text)
        if not any(path.endswith(f"/{name}") or path == name for path in modules)
    ]
    assert not missing
    named_pairs = re.findall(r"`([\w/]+\.py)`[,:] `([\w.]+)(?<!\.py)`", text)
    assert len(named_pairs) >= 12
    for module, name in named_pairs:
        (source,) = [text for path, text in modules.items() if path.endswith(f"kerneltune/{module}")]
        assert re.search(rf"^\s*(?:def |class )?{name.rpartition('.')[2]}\b", source, re.MULTILINE), f"{module}: {name}"


def test_contributing_names_every_make_target_and_helper_of_tests() -> None:
    text = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    helpers = {path.stem for path in (ROOT / "tests").glob("*.py") if not path.name.startswith("test_")}
    assert [name for name in targets.split() if f"`make {name}" not in text] == []
    assert sorted(name for name in helpers if f"`{name}`" not in text and name != "conftest") == []


def test_readme_has_at_most_150_lines_and_580_words_of_prose() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150
    assert len(prose(README).split()) <= 580


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_of_a_page_have_targets(page: Path) -> None:
    missing = [link for link in LINK.findall(re.sub(r"`[^`]*`", "", prose(page))) if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_to_headings_of_a_page_have_targets(page: Path) -> None:
    """A code host gives headings the same anchors as the site."""
    links = re.findall(r"\]\(([^):#]*\.md|)#([^)]+)\)", re.sub(r"`[^`]*`", "", prose(page)))
    missing = [(name, anchor) for name, anchor in links if anchor not in anchors(page.parent / name if name else page)]
    assert not missing


def anchors(page: Path) -> set[str]:
    """Return the anchors that a code host gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    """`--quiet` would hide warnings from `--strict` as well."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "commands" / "index.html").read_text(encoding="utf-8")
    assert "kerneltune sweep" in page
    assert "kerneltune gate" in page
    assert "Check, tune missing configs, measure all variants and peers, and keep the records." in page
    assert "profiled" not in page
    assert 'href="../../results/rmsnorm/"' in (tmp_path / "site" / "notes" / "rmsnorm" / "index.html").read_text(encoding="utf-8")
    families_page = (tmp_path / "site" / "results" / "index.html").read_text(encoding="utf-8")
    assert 'data-md-type="toc" hidden' in families_page, "a table of ten columns needs the room"
    assert "geometric mean" in (tmp_path / "site" / "results" / "rmsnorm" / "index.html").read_text(encoding="utf-8")
    listed = (tmp_path / "site" / "architecture" / "index.html").read_text(encoding="utf-8")
    assert "<td><code>nearness.py</code></td>\n<td>Rank stored configs by their distance to a case.</td>" in listed
