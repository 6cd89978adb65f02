"""Try a wheel as a user does: install it, run README's commands in an empty folder, uninstall it.

Usage: `python .ci/try_wheel.py dist/NAME.whl [PYTHON]`. PYTHON is that of a virtual environment that has the wheel's
requirements and no kerneltune; without PYTHON such an environment is made in a temporary folder. Exit code 1 where a command
fails or prints something else than README shows, changes the environment, or where `pip uninstall` leaves a file.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
SCRIPT = re.compile(r"```python\n(import kerneltune.*?)```", re.DOTALL)


def main(wheel: Path, python: Path | None) -> int:
    """Return the number of things that went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        if python is None:
            python = Path(folder, "venv", "bin", "python")
            call(sys.executable, "-m", "venv", str(python.parents[1]))
        return trial(wheel, python, Path(folder))


def trial(wheel: Path, python: Path, folder: Path) -> int:
    """Install, run, uninstall; return the number of things that went wrong."""
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "-q")
    requirements = subprocess.run([*pip, "freeze"], capture_output=True, text=True, check=True).stdout
    if "torch==" not in requirements:  # a new environment: what remains after uninstalling is compared with its requirements
        call(*pip, "install", "--no-compile", "--constraint", str(ROOT / "constraints.txt"), str(wheel))
        call(*pip, "uninstall", "--yes", "kerneltune")
    before = files(python)
    call(*pip, "install", "--no-compile", "--no-deps", str(wheel))
    installed = files(python)
    work = folder / "empty"
    work.mkdir()
    failed = sum(not shown_is_printed(command, output, python, work) for command, output in shown())
    changed = sorted(installed ^ files(python))
    call(*pip, "uninstall", "--yes", "kerneltune")
    left = sorted(files(python) - before)
    for name, found in (("changed in the environment", changed), ("left by pip uninstall", left)):
        for path in found:
            print(f"{name}: {path}")
    print(f"{len(shown())} commands, {failed} failed; {len(changed)} files changed, {len(left)} left")
    return failed + len(changed) + len(left)


def shown() -> list[tuple[str, str]]:
    """Return README's commands with the output that follows each."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    steps = [step for block in CONSOLE.findall(readme) for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(first, rest) for first, _, rest in (step.partition("\n") for step in steps)]


def shown_is_printed(command: str, output: str, python: Path, folder: Path) -> bool:
    """Run a command; say what differs from README."""
    script = SCRIPT.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert script is not None
    (folder / "double.py").write_text(script[1], encoding="utf-8")
    kept = ("HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    env |= {"PATH": f"{python.parent}:/usr/bin:/bin", "COLUMNS": "80", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(shlex.split(command), cwd=folder, env=env, capture_output=True, text=True)
    printed, wanted = ([line.rstrip() for line in text.splitlines()] for text in (done.stdout + done.stderr, output))
    is_there = any(printed[at : at + len(wanted)] == wanted for at in range(len(printed)))
    if done.returncode or not is_there:
        print(f"$ {command}\nexit code {done.returncode}\n{done.stdout}{done.stderr}")
    return not done.returncode and is_there


def files(python: Path) -> set[tuple[str, int]]:
    """Return path and size of every file of the environment's packages, but compiled Python."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    root = Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())
    found = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {(str(path.relative_to(root)), path.stat().st_size) for path in found}


def call(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)))
