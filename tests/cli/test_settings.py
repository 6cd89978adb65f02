"""`[tool.kerneltune]`, options behind the command, and the folders that are written to outside of a checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import refused, run

from kerneltune import cache, files, ops, sweep_file
from kerneltune.cli import settings
from kerneltune.plan import cached_runs

SHOW = "import sys; from kerneltune.cli import main; sys.argv[1:] = {arguments!r}; main()"


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = SHOW.format(arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=800)


def pyproject(folder: Path, text: str) -> None:
    (folder / "pyproject.toml").write_text(f"[tool.kerneltune]\n{text}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plugins = 'x.py'", "tool.kerneltune.plugins: 'x.py': expected array"),
        ("results = 3", "tool.kerneltune.results: 3: expected str | null"),
        ("colour = 'red'", "tool.kerneltune.colour: 'red': expected no field of this name"),
        ("results", "Expected '=' after a key in a key/value pair (at line 2, column 8)"),
    ],
)
def test_settings_with_a_wrong_value_fail_with_one_line(text: str, message: str, tmp_path: Path) -> None:
    pyproject(tmp_path, text)
    done = started(tmp_path, "ops")
    assert (done.returncode, done.stderr) == (2, f"error: pyproject.toml: {message}\n")


def test_settings_set_plug_ins_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyproject(tmp_path, "plugins = ['mine.py']\nresults = 'r'\nconfigs = 'c'")
    monkeypatch.chdir(tmp_path)
    for name in ("KERNELTUNE_RESULTS", "KERNELTUNE_CONFIGS", ops.PLUGINS):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    settings.apply()
    assert sweep_file.results_root(None) == Path("r")
    assert cache.default_root() == Path("c")
    assert os.environ[ops.PLUGINS] == "mine.py"


def test_missing_plug_in_of_the_settings_names_their_file(tmp_path: Path) -> None:
    pyproject(tmp_path, "plugins = ['no_such_module']")
    done = started(tmp_path, "ops")
    assert done.returncode == 2
    assert done.stderr.endswith("'no_such_module'; pyproject.toml names it in tool.kerneltune.plugins\n")
    pyproject(tmp_path, "plugins = []")
    assert "pyproject" not in started(tmp_path, "--plugin", "no_such_module", "ops").stderr


def test_plugin_option_behind_the_command_loads_the_plug_in(tmp_path: Path) -> None:
    done = started(tmp_path, "ops", "--plugin", "no_such_module")
    assert done.returncode == 2
    assert done.stderr.startswith("error: plug-in no_such_module: ")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the packaged configs, used from an empty folder."""
    monkeypatch.delenv("KERNELTUNE_CONFIGS", raising=False)
    monkeypatch.delenv("KERNELTUNE_RESULTS", raising=False)
    monkeypatch.chdir(tmp_path)
    cache.clear()
    return files.data_root("configs")


def test_installed_package_is_never_written_to(installed: Path) -> None:
    assert sweep_file.results_root(None) == Path("results")
    assert cache.default_root() == Path("configs")
    assert cache.path_of("rmsnorm_fwd", "nvidia_h200") == installed / "nvidia_h200" / "rmsnorm_fwd.json"
    before = cache.load("rmsnorm_fwd", "nvidia_h200")
    stored = cache.store("nvidia_h200", before[0])
    assert stored == Path("configs/nvidia_h200/rmsnorm_fwd.json")
    assert cache.path_of("rmsnorm_fwd", "nvidia_h200") == stored
    assert len(cache.load("rmsnorm_fwd", "nvidia_h200")) == len(before)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("cache", "list"), "nvidia_h200"),
        (("cache", "show", "rmsnorm_bwd"), "te-8192x4096"),
        (("cache", "explain", "rmsnorm_bwd", "M=8192,N=4096"), "the cache's entry"),
        (("cache", "explain", "rmsnorm_bwd", "M=5000,N=4096"), "the cache's nearest entry, that of M="),
    ],
)
def test_installed_package_shows_its_configs_from_any_folder(command: tuple[str, ...], shown: str) -> None:
    result = run(*command)
    assert result.exit_code == 0, result.output
    assert shown in result.stdout
    assert not any(Path().iterdir())


@pytest.mark.usefixtures("installed")
def test_installed_package_inspects_its_configs_and_those_of_the_current_folder() -> None:
    operators = ops.load()
    packaged = cached_runs([operators["rmsnorm_bwd"]], "nvidia_h200")
    assert packaged
    assert refused("inspect", "rmsnorm_bwd", "--case", "nope").startswith("error: case: 'nope': expected one of te-")
    Path("configs/nvidia_h200").mkdir(parents=True)
    none = {"schema": 1, "op": "rmsnorm_bwd", "device": "nvidia_h200", "entries": []}
    Path("configs/nvidia_h200/rmsnorm_bwd.json").write_text(json.dumps(none))
    cache.clear()
    assert cached_runs([operators["rmsnorm_bwd"]], "nvidia_h200") == []
    assert cached_runs([operators["rmsnorm_fwd"]], "nvidia_h200")
