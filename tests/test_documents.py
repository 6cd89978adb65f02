"""README and docs: shown commands run and print what is shown; links lead somewhere; the site builds."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
CODE = re.compile(r"```.*?```", re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
GENERATED = {"commands.md", "results"}
TOOL = "from kerneltune.cli import main; main()"


def shown() -> list[tuple[str, str]]:
    """Every command of README's console blocks with the output that follows it."""
    steps = [step for block in CONSOLE.findall(README) for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(first, rest) for first, _, rest in (step.partition("\n") for step in steps)]


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize(("command", "output"), shown(), ids=lambda text: text[:40])
def test_readme_command_prints_what_is_shown(command: str, output: str, tmp_path: Path) -> None:
    python = re.search(r"```python\n(import kerneltune.*?)```", README, re.DOTALL)
    assert python is not None
    (tmp_path / "double.py").write_text(python[1])
    words = [sys.executable if word == "python" else word for word in shlex.split(command)[1:]]
    env = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    env = {
        name: value for name, value in env.items() if name not in ("KERNELTUNE_CONFIGS", "KERNELTUNE_RESULTS", "TRITON_INTERPRET")
    }
    done = subprocess.run(
        [sys.executable, "-c", TOOL, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    printed = lines(done.stdout + done.stderr)
    wanted = lines(output)
    assert any(printed[at : at + len(wanted)] == wanted for at in range(len(printed))), done.stdout + done.stderr


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 900


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    missing = [
        link
        for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
        if not (page.parent / link).exists() and not {Path(link).name, *Path(link).parts} & GENERATED
    ]
    assert not missing


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "commands" / "index.html").read_text(encoding="utf-8")
    assert "kerneltune sweep" in page
    assert "kerneltune gate" in page
    assert "geometric mean" in (tmp_path / "site" / "results" / "rmsnorm" / "index.html").read_text(encoding="utf-8")
