"""Captured kernels are found again under the program's arguments, globals and autotuners."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from kerneltune.adopt import startup
from kerneltune.adopt.folder import LaunchClass
from kerneltune.adopt.kernels import KernelName
from kerneltune.adopt.operators import write_capture_sweep
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.replay import ReplayError, live_kernel

HEAD = """
import os, sys
import triton
import triton.language as tl
CONFIGS = [triton.Config({"BLOCK": block}) for block in (32, 64)]
"""
KERNEL = """
@triton.jit
def added(x_ptr, N, scale, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + places, tl.load(x_ptr + places, mask=places < N) + K, mask=places < N)
"""
TUNED = "added = triton.autotune(CONFIGS, key=['N'])(added)\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what writes a module and imports it, anew each time."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def written(name: str, text: str) -> Any:
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        return __import__(name)

    yield written
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", "") or "/").parent == tmp_path:
            del sys.modules[name]


def captured(folder: Path, kernel: Any, scale: Any = 1.0) -> list[LaunchClass]:
    """Capture a launch on zeros (8,); returns the classes of the capture."""
    startup.capture(folder)
    kernel[(1,)](torch.zeros(8), 8, scale)
    startup.recorder().flush()
    startup.uninstall()
    return read_capture(folder).classes


def test_live_kernel_is_loaded_with_arguments_of_the_program(tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program.py", "a", "b"])
    (launch,) = captured(tmp_path / "cap", write("of_arguments", HEAD + "K = tl.constexpr(len(sys.argv))" + KERNEL + TUNED).added)
    monkeypatch.setattr(sys, "argv", ["kerneltune"])
    del sys.modules["of_arguments"]
    assert live_kernel(launch).base_fn.__globals__["K"].value == 3
    assert sys.argv == ["kerneltune"]


@pytest.mark.parametrize("kind", ["int", "tl.constexpr"])
def test_live_kernel_with_another_global_than_captured_raises(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("WIDTH", "22")
    module = write("of_global", HEAD + f"K = {kind}(len(os.environ['WIDTH']))" + KERNEL + TUNED)
    (launch,) = captured(tmp_path / "cap", module.added)
    monkeypatch.setenv("WIDTH", "333")
    del sys.modules["of_global"]
    with pytest.raises(
        ReplayError, match=r"^of_global.added: the kernel reads added.K, which was 2 when captured and is 3 here$"
    ):
        live_kernel(launch)


def test_live_kernel_is_found_in_the_module_that_autotunes_it(tmp_path: Path, write: Any) -> None:
    write("of_kernels", HEAD + "K = 1" + KERNEL)
    user = write("of_user", HEAD + "from of_kernels import added\nchosen = triton.autotune(CONFIGS, key=['N'])(added)\n")
    (launch,) = captured(tmp_path / "cap", user.chosen)
    assert (launch.kernel.text, launch.problem) == ("of_kernels.added", "")
    assert live_kernel(launch) is user.chosen


def test_live_kernel_is_loaded_from_the_programs_folder_beside_an_installed_module_of_its_name(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "installed"
    installed.mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(installed), *(entry for entry in sys.path if entry != str(tmp_path))])
    write("of_helper", "K = 1\n")
    module = write("of_shadowed", HEAD + "from of_helper import K" + KERNEL + TUNED)
    (launch,) = captured(tmp_path / "cap", module.added)
    for name in ("of_helper", "of_shadowed"):
        (installed / f"{name}.py").write_text("")
        del sys.modules[name]
    del sys.path[0]
    monkeypatch.chdir(tmp_path)
    assert live_kernel(launch).base_fn.__globals__["K"] == 1
    assert (sys.path[0], sys.path.count(str(tmp_path))) == (str(installed), 1)


def test_home_of_a_kernel_is_the_name_bound_before_the_variable_of_a_loop(tmp_path: Path, write: Any) -> None:
    tuned = "BY_COUNT = {n: triton.autotune(CONFIGS[:n], key=['N'])(added) for n in (2, 1)}\n"
    module = write("of_loop", HEAD + "K = 1" + KERNEL + tuned + "for tuned in BY_COUNT.values():\n    pass\n")
    (launch,) = captured(tmp_path / "cap", module.tuned)
    assert launch.home == KernelName("of_loop", "BY_COUNT")
    assert live_kernel(launch) is module.BY_COUNT[1]


HELD = {
    "Layer.tuned": "class Layer:\n    tuned = triton.autotune(CONFIGS, key=['N'])(added)\n",
    "Layer.static": "class Layer:\n    static = staticmethod(triton.autotune(CONFIGS, key=['N'])(added))\n",
    "BY_COUNT[1]": "BY_COUNT = {}\nfor n in (2, 1):\n    BY_COUNT[n] = triton.autotune(CONFIGS[:n], key=['N'])(added)\n",
    "PAIR[1]": "PAIR = (None, triton.autotune(CONFIGS, key=['N'])(added))\n",
}
"""The ways in which a module names an autotuner, each with the module's statements for it."""


@pytest.mark.parametrize("holder", HELD)
@pytest.mark.parametrize("is_imported", [False, True])
def test_kernel_that_a_class_or_a_container_holds_is_found_there(
    tmp_path: Path, write: Any, holder: str, is_imported: bool
) -> None:
    name = f"of_{re.sub('[^A-Za-z]', '', holder)}_{is_imported}"
    kernels = "from of_base import added\n" if is_imported else KERNEL
    if is_imported:
        write("of_base", HEAD + "K = 1" + KERNEL)
    module = write(name, HEAD + "K = 1\n" + kernels + HELD[holder])
    kernel = eval(holder, vars(module))
    (launch,) = captured(tmp_path / "cap", kernel)
    assert (launch.home, launch.problem) == (KernelName(name, re.split("[.[]", holder)[0]), "")
    assert live_kernel(launch) is kernel


MADE = """
import linecache
linecache.cache["<made>"] = (len(SOURCE), None, SOURCE.splitlines(True), "<made>")
exec(compile(SOURCE, "<made>", "exec"))
"""


def test_kernel_whose_source_a_module_writes_is_found_in_the_module(tmp_path: Path, write: Any) -> None:
    """Xformers unrolls the arguments of a kernel so, for each number of groups."""
    text = f"{HEAD}K = tl.constexpr(1)\nSOURCE = {KERNEL + TUNED!r}\n{MADE}ALL = {{1: added}}\ndel added\n"
    module = write("of_made", text)
    (launch,) = captured(tmp_path / "cap", module.ALL[1])
    assert (launch.home, launch.problem) == (KernelName("of_made", "ALL"), "")
    assert live_kernel(launch) is module.ALL[1]
    other = write("of_made", text.replace("+ K", "+ K + K"))
    (changed,) = captured(tmp_path / "other", other.ALL[1])
    assert changed.source_digest != launch.source_digest
    write("of_made", text)
    write_capture_sweep(read_capture(tmp_path / "cap"))
    command = [sys.executable, "-m", "kerneltune", "sweep", str(tmp_path / "cap"), "--check-only"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "passed: 2 checks" in done.stdout, done.stdout + done.stderr


def forget(package: str) -> None:
    """Drop a package and its modules from the imported modules."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def from_file(name: str, file: Path) -> Any:
    """Execute a file as a module of this name, as programs load plug-ins."""
    spec: Any = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernel_of_a_file_that_the_program_named_itself_is_loaded_from_the_file(tmp_path: Path, write: Any) -> None:
    write("of_plugin", HEAD + "K = 1" + KERNEL + TUNED)
    (launch,) = captured(tmp_path / "cap", from_file("of_plugin_of_mine", tmp_path / "of_plugin.py").added)
    assert (launch.kernel.text, launch.problem) == ("of_plugin_of_mine.added", "")
    live = live_kernel(launch)
    assert (live.base_fn.__module__, live.base_fn.__code__.co_filename) == ("of_plugin_of_mine", str(tmp_path / "of_plugin.py"))


def test_kernel_in_a_package_that_the_program_named_itself_is_loaded_from_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "node" / "inner"
    folder.mkdir(parents=True)
    (tmp_path / "node" / "__init__.py").write_text("from .inner import kernels\n")
    (folder / "__init__.py").write_text("")
    (folder / "kernels.py").write_text(HEAD + "from ..constants import K\n" + KERNEL + TUNED)
    (tmp_path / "node" / "constants.py").write_text("K = 1\n")
    spec: Any = importlib.util.spec_from_file_location("of_node", tmp_path / "node" / "__init__.py")
    monkeypatch.setitem(sys.modules, "of_node", importlib.util.module_from_spec(spec))
    spec.loader.exec_module(sys.modules["of_node"])
    (launch,) = captured(tmp_path / "cap", sys.modules["of_node.inner.kernels"].added)
    forget("of_node")
    assert (launch.kernel.text, launch.problem) == ("of_node.inner.kernels.added", "")
    live = live_kernel(launch)
    assert live.base_fn.__code__.co_filename == str(folder / "kernels.py")
    forget("of_node")


def test_plugin_that_is_gone_says_what_to_set(tmp_path: Path, write: Any) -> None:
    write("of_gone", HEAD + "K = 1" + KERNEL + TUNED)
    (launch,) = captured(tmp_path / "cap", from_file("of_gone_plugin", tmp_path / "of_gone.py").added)
    (tmp_path / "of_gone.py").unlink()
    with pytest.raises(ReplayError, match=r"^of_gone_plugin \(.*of_gone.py\): No module named 'of_gone_plugin': set PYTHONPATH"):
        live_kernel(launch)


def test_live_kernel_search_runs_no_code_of_other_globals(tmp_path: Path, write: Any) -> None:
    lazy = "class Lazy:\n    def __getattr__(self, name):\n        raise ImportError(name)\nlazy = Lazy()\n"
    module = write("of_lazy", HEAD + "K = 1\n" + lazy + KERNEL + "chosen = triton.autotune(CONFIGS, key=['N'])(added)\n")
    (launch,) = captured(tmp_path / "cap", module.chosen)
    assert live_kernel(launch) is module.chosen


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("added[(1,)](torch.zeros(8), 8, 1.0)\n", ""),
        ("1 / (len(sys.argv) - 1)\n", r"importing fails here: of_failure\.py:\d+: ZeroDivisionError: "),
    ],
)
def test_live_kernel_of_a_module_with_work_at_its_top_is_loaded_or_raises(
    tmp_path: Path, write: Any, more: str, message: str
) -> None:
    name = "of_failure" if message else "of_work"
    (launch,) = captured(tmp_path / "cap", write(name, HEAD + "import torch\nK = 1" + KERNEL + TUNED).added)
    (tmp_path / f"{name}.py").write_text(HEAD + "import torch\nK = 1" + KERNEL + TUNED + more)
    importlib.invalidate_caches()
    del sys.modules[name]
    if message:
        with pytest.raises(ReplayError, match=message):
            live_kernel(structs.replace(launch, argv=("program.py",)))
    else:
        assert live_kernel(launch).base_fn.__name__ == "added"


def test_capture_of_a_kernel_that_no_module_holds_records_the_problem(tmp_path: Path, write: Any) -> None:
    module = write(
        "of_nobody", HEAD + "K = 1" + KERNEL + "held = lambda kernel=triton.autotune(CONFIGS, key=['N'])(added): kernel\n"
    )
    (launch,) = captured(tmp_path / "cap", module.held())
    assert launch.problem == "no module holds its autotuner by a name, so that it cannot be imported"


def test_live_kernel_autotuned_under_a_variable_raises_without_the_variable(
    tmp_path: Path, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNES", "1")
    module = write("of_variable", HEAD + "K = 1" + KERNEL + "if 'TUNES' in os.environ:\n    " + TUNED)
    (launch,) = captured(tmp_path / "cap", module.added)
    monkeypatch.delenv("TUNES")
    del sys.modules["of_variable"]
    with pytest.raises(ReplayError, match=r"of_variable.py does not autotune it here: set the environment variables of "):
        live_kernel(launch)


def test_capture_of_a_second_kernel_of_one_name_is_refused(
    tmp_path: Path, write: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRST", "1")
    text = (
        HEAD
        + "K = 1"
        + KERNEL
        + TUNED
        + "first = added if 'FIRST' in os.environ else None\n"
        + KERNEL.replace("+ K", "+ 2 * K")
        + TUNED
    )
    module = write("of_two", text)
    startup.capture(tmp_path / "cap")
    for kernel in (module.first, module.added):
        kernel[(1,)](torch.zeros(8), 8, 1.0)
    startup.uninstall()
    (launch,) = read_capture(tmp_path / "cap").classes
    assert "of_two.added: not captured: the file has several kernels of this name: give each a name of its own" in caplog.text
    del sys.modules["of_two"]
    monkeypatch.delenv("FIRST")
    with pytest.raises(ReplayError, match="several kernels of this name"):
        live_kernel(launch)


@pytest.mark.parametrize("scale", [float("-inf"), float("nan")])
def test_captured_launch_with_an_infinite_argument_is_read_back(tmp_path: Path, write: Any, scale: float) -> None:
    (launch,) = captured(tmp_path / "cap", write("of_infinity", HEAD + "K = 1" + KERNEL + TUNED).added, scale=scale)
    assert launch.arguments[2].value == {"float": str(scale)}


def test_captured_launch_that_no_config_can_make_has_a_problem(
    tmp_path: Path, write: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = write("of_grid", HEAD + "K = 1" + KERNEL + TUNED).added
    startup.capture(tmp_path / "cap")
    with pytest.raises(KeyError):
        kernel[lambda meta: (meta["ROWS"],)](torch.zeros(8), 8, 1.0)
    startup.uninstall()
    (launch,) = read_capture(tmp_path / "cap").classes
    assert launch.problem == "no config can be launched: KeyError: 'ROWS'"
    assert "of_grid.added: cannot be tuned: no config can be launched: KeyError: 'ROWS'" in caplog.text
    with pytest.raises(ValueError, match=r"^added 8 float32 N=8: no config can be launched: KeyError: 'ROWS'$"):
        _ = launch.author_choice


def test_uncapturable_launch_without_a_gpu_runs(tmp_path: Path, write: Any, caplog: pytest.LogCaptureFixture) -> None:
    kernel = write("of_tuple", HEAD + "K = 1" + KERNEL + TUNED).added
    x = torch.zeros(8)
    startup.capture(tmp_path / "cap")
    kernel[(1,)](x, 8, (object(),))
    startup.uninstall()
    assert "argument scale: a value of type builtins.object" in caplog.text
    assert (x.tolist(), kernel.best_config) == ([1.0] * 8, kernel.configs[0])


def test_captured_launch_whose_pruning_needs_a_gpu_has_all_configs(
    tmp_path: Path, write: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prune = "def prune(configs, given, **_):\n    raise RuntimeError('0 active drivers')\n"
    tuned = TUNED.replace("key", "prune_configs_by={'early_config_prune': prune}, key")
    (launch,) = captured(tmp_path / "cap", write("of_pruning", HEAD + prune + "K = 1" + KERNEL + tuned).added)
    assert [one.config.kwargs["BLOCK"] for one in launch.candidates] == [32, 64]
    assert "of_pruning.added: pruning fails without a GPU (RuntimeError: 0 active drivers): no config is pruned" in caplog.text
