"""Define a journey, and run commands as a user does.

A journey is a function of a Place. It raises an exception, as a rule JourneyError, where a user would miss a promise of the
documents, and NotRun where a package or a tool is missing.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROGRAMS = HERE / "programs"
_SHOWN = 30
"""Last lines of a command's output that an error shows."""


PASSED, FAILED, LEFT_OUT, INTERRUPTED = "yes", "no", "not run", "interrupted"
"""Ends of a journey."""


class JourneyError(Exception):
    """The user would see something else than was promised."""


class NotRun(Exception):  # noqa: N818
    """A package or a tool that this machine lacks; the text says which."""


@dataclass(frozen=True)
class Journey:
    """A promise of the documents, with the function that tries it.

    Attributes:
        limit_s: seconds after which it is ended.
        alone: whether nothing else may run beside it, because it judges times.
        packages: that it imports; without them it is not run.
        ops: families of operators whose code decides its result; None for all that its processes import.
        without_gpu: whether it also runs without a GPU.
    """

    name: str
    run: Callable[["Place"], None]
    limit_s: float = 120.0
    alone: bool = False
    packages: tuple[str, ...] = ()
    ops: tuple[str, ...] | None = ()
    without_gpu: bool = False

    def code(self, modules: Iterable[str]) -> list[str]:
        """Return the modules of the journey's code among the modules that its processes imported.

        Commands load all operators to know their names.
        """
        folders = {path.name for path in (ROOT / "kerneltune" / "ops").iterdir() if path.is_dir()}
        left_out = folders - set(folders if self.ops is None else self.ops)
        return [name for name in modules if not (name.startswith("kerneltune.ops.") and name.split(".")[2] in left_out)]

    def missing(self) -> list[str]:
        """Return the packages that this machine lacks."""
        return [package for package in self.packages if importlib.util.find_spec(package) is None]


JOURNEYS: dict[str, Journey] = {}


def journey(**options: Any) -> Callable[[Callable[["Place"], None]], Callable[["Place"], None]]:
    """Register a function as the journey of its name."""

    def register(run: Callable[["Place"], None]) -> Callable[["Place"], None]:
        JOURNEYS[run.__name__] = Journey(run.__name__, run, **options)
        return run

    return register


@dataclass
class Place:
    """An empty folder that a journey runs in.

    Attributes:
        gpu: name, slug, arch and versions of the GPU; the slug is `interpreter` on a machine without a GPU.
        remarks: that the table shows of a journey that passed.
    """

    folder: Path
    gpu: Mapping[str, str]
    remarks: list[str] = field(default_factory=list)

    @property
    def has_gpu(self) -> bool:
        """Return whether there is a GPU."""
        return self.gpu["slug"] != "interpreter"

    def call(
        self,
        command: Sequence[str | Path],
        code: int | Sequence[int] = 0,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, show it with its output, and return it.

        Args:
            code: expected exit code, or several.
            env: variables; None removes a variable.
            cwd: the journey's folder if None.

        Raises:
            JourneyError: another exit code than `code`.
        """
        words = [str(word) for word in command]
        print(
            "$", " ".join(["kerneltune" if words[:3] == KERNELTUNE else "python", *words[3 if words[:3] == KERNELTUNE else 1 :]])
        )
        environment = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
        done = subprocess.run(words, cwd=cwd or self.folder, env=environment, capture_output=True, text=True, check=False)
        print(done.stdout, done.stderr, f"exit code {done.returncode}\n", sep="", flush=True)
        expected = [code] if isinstance(code, int) else list(code)
        if done.returncode not in expected:
            last = "\n".join((done.stdout + done.stderr).splitlines()[-_SHOWN:])
            raise JourneyError(f"exit code {done.returncode}, expected {' or '.join(map(str, expected))}\n{last}")
        return done

    def kerneltune(
        self, *arguments: str | Path, code: int | Sequence[int] = 0, env: Mapping[str, str | None] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of kerneltune; see `call`."""
        return self.call([*KERNELTUNE, *arguments], code, env)

    def python(
        self, *arguments: str | Path, code: int | Sequence[int] = 0, env: Mapping[str, str | None] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run Python; see `call`."""
        return self.call([sys.executable, *arguments], code, env)

    def bring(self, *names: str) -> None:
        """Copy programs here; the folder `packages` becomes `site-packages`, on the path of later commands."""
        for name in names:
            if (PROGRAMS / name).is_dir():
                target = self.folder / "site-packages"
                shutil.copytree(PROGRAMS / name, target, ignore=shutil.ignore_patterns("__pycache__"))
                os.environ["PYTHONPATH"] = os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")])
            else:
                shutil.copy(PROGRAMS / name, self.folder)

    @cached_property
    def results(self) -> Path:
        """Return the folder of this GPU's records."""
        return Path(os.environ["KERNELTUNE_RESULTS"]) / self.gpu["slug"]

    @cached_property
    def configs(self) -> Path:
        """Return the folder of this GPU's configs."""
        return Path(os.environ["KERNELTUNE_CONFIGS"]) / self.gpu["slug"]

    def rows(self, file: Path) -> list[dict[str, Any]]:
        """Return the records of a file.

        Raises:
            JourneyError: there are none.
        """
        require(file.is_file(), f"{file}: no such file")
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        require(bool(rows), f"{file}: no records")
        return rows


KERNELTUNE = [sys.executable, "-m", "kerneltune"]


def require(condition: bool, text: str) -> None:
    """Raise JourneyError with a text unless the condition holds."""
    if not condition:
        raise JourneyError(text)


def json_lines(text: str) -> list[dict[str, Any]]:
    """Return the lines of JSON in a program's output."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def inside(journey: Journey, verdict_file: Path) -> int:
    """Run a journey in this process, and write its end."""
    place = Place(Path.cwd(), json.loads(os.environ["JOURNEY_GPU"]))
    try:
        journey.run(place)
        passed, reason = PASSED, "; ".join(place.remarks)
    except NotRun as error:
        passed, reason = LEFT_OUT, str(error)
    except Exception as error:
        traceback.print_exc()
        passed, reason = FAILED, str(error) or type(error).__name__
    verdict_file.write_text(json.dumps({"passed": passed, "reason": reason}))
    return 0
