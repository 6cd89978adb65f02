"""The fenced blocks of README and docs, the commands that they hold, and how a command is parsed as the command line does."""

import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from kerneltune.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(kerneltune [a-z][^`…]*)`")
_INDENTED = re.compile(r"^    (?:kerneltune|make|pip|git|python|\$|- (?:repo|uses)) .*", re.MULTILINE)


def _is_setting(word: str) -> bool:
    return re.fullmatch(r"[A-Z_]+=\S*", word) is not None


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its first line there, its language, its text."""

    page: Path
    line: int
    kind: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def file_name(self) -> str | None:
        """Return the name in the first line, such as `# use.py`, under which the reader is to store the block."""
        matched = re.match(r"# (\w+\.(?:py|yaml|toml))\n", self.text)
        return matched[1] if matched else None

    def commands(self) -> Iterator["Command"]:
        """Yield the commands of a sh or console block, those of console with the output that is shown."""
        if self.kind == "console":
            for step in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
                first, _, output = step.partition("\n")
                yield Command(self, first, output.splitlines())
        elif self.kind == "sh":
            for line in self.text.replace("\\\n", " ").splitlines():
                if line and not line.startswith("#"):
                    yield Command(self, line, None)


@dataclass(frozen=True)
class Command:
    """A line for the shell; `output` is what a console block shows behind it."""

    block: Block
    line: str
    output: list[str] | None

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that are set in front of the command."""
        return dict(word.split("=", 1) for word in itertools.takewhile(_is_setting, self._words))

    @property
    def words(self) -> list[str]:
        return list(itertools.dropwhile(_is_setting, self._words))

    @property
    def _words(self) -> list[str]:
        return shlex.split(self.line, comments=True)


def blocks(page: Path) -> list[Block]:
    """Return every fenced block of a page."""
    text = page.read_text(encoding="utf-8")
    return [Block(page, text[: m.start()].count("\n") + 1, m[2], m[3]) for m in _FENCE.finditer(text)]


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def inline_commands(page: Path) -> list[str]:
    """Return the commands in the prose of a page."""
    return [" ".join(found.split()) for found in _INLINE.findall(prose(page))]


def indented_commands(page: Path) -> list[str]:
    """Return lines of commands that are indented, which no fence marks as a block."""
    return [found[0] for found in _INDENTED.finditer(prose(page))]


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Parse `kerneltune WORDS` as the command line does; return the command's name, such as `cache explain`, and its values.

    Raises:
        Exception: typer's usage error: an unknown command or option, a missing or malformed value.
    """
    command: Any = typer.main.get_command(app)
    names, values, context = [], {}, None
    while True:
        context = command.make_context(names[-1] if names else "kerneltune", list(words), parent=context)
        values |= context.params
        if not hasattr(command, "resolve_command"):
            return " ".join(names), values
        rest = [*getattr(context, "_protected_args", getattr(context, "protected_args", [])), *context.args]
        name, command, words = command.resolve_command(context, rest)
        names.append(str(name))


def known_options(words: list[str]) -> list[str]:
    """Return the mistakes of a command in prose, whose arguments may be left out: unknown commands and options."""
    command: Any = typer.main.get_command(app)
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    rest = [word for word in words if not word.startswith("-")]
    while hasattr(command, "commands") and rest:
        if rest[0] not in command.commands:
            return [f"no command {rest[0]!r}"]
        command = command.commands[rest.pop(0)]
        options |= {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    typed = [word.split("=")[0] for word in words[: words.index("--") if "--" in words else None] if word.startswith("-")]
    return [f"no option {option}" for option in typed if option not in {*options, "--help"}]


def options_in_prose(page: Path) -> set[str]:
    """Return the options that begin code in the prose of a page, such as a table of options."""
    return set(re.findall(r"`(--[a-z][a-z-]+)[^`]*`", prose(page)))


def all_options(command: Any = None) -> set[str]:
    """Return the options of a command and of its commands, by default of the whole command line."""
    command = command or typer.main.get_command(app)
    own = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return own.union(*(all_options(each) for each in getattr(command, "commands", {}).values()))


def write_files(page: Path, folder: Path) -> None:
    """Store the blocks of a page that name a file in their first line."""
    for block in blocks(page):
        if block.file_name:
            (folder / block.file_name).write_text(block.text, encoding="utf-8")


def install(folder: Path) -> None:
    """Leave behind what installing the package of a folder's pyproject.toml does, as far as entry points need it."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["kerneltune.ops"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[kerneltune.ops]", *lines]) + "\n")
