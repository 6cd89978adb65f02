"""Serving: launches run with configs of the table, nothing is timed, and launches without a row follow the policy."""

import hashlib
import json
import logging
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from adopted import author_configs, captured, example, kernel_of, of_kernel, run_python, served, tuned_folder, write_table

from kerneltune.adopt import program, startup, table
from kerneltune.adopt.folder import read_json
from kerneltune.adopt.overview import read_capture
from kerneltune.adopt.replay import live_kernel
from kerneltune.adopt.table import MANIFEST, Group, ServingRow, read_table


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where an author's autotuner times anything."""

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("something was timed")

    for kernel in (example().row_sum, example().scale_chosen):
        monkeypatch.setattr(kernel, "_do_bench", refuse)
        kernel.__dict__.pop("do_bench", None)


@pytest.mark.usefixtures("untimed")
def test_serving_a_tuned_launch_runs_its_config_and_times_nothing(tmp_path: Path) -> None:
    tuned_folder(tmp_path)
    module = example()
    expected = module.row_sum.configs[3]
    server = served(tmp_path, miss="default")
    assert module.step(4, 96).tolist() == [566.0, 287.0, 582.0, 288.0]
    assert module.row_sum.best_config is expected
    assert (server.hits, server.tunings) == (1, 0)


def test_serving_with_policy_author_lets_the_authors_autotuner_choose_among_all_configs(tmp_path: Path) -> None:
    tuned_folder(tmp_path)
    module = example()
    tried = []
    module.row_sum.__dict__["do_bench"] = lambda call, quantiles: [float(tried.append(call) or -len(tried))] * 3
    server = served(tmp_path)
    try:
        module.row_sum[(4,)](torch.ones(4, 64), torch.empty(4), 4, 64)
        module.row_sum[(4,)](torch.ones(4, 64), torch.empty(4), 4, 64)
    finally:
        del module.row_sum.__dict__["do_bench"]
    assert len(tried) == 6
    assert server.tunings == 1
    assert module.row_sum.best_config.kwargs == {"BLOCK": 256}


def test_serving_a_miss_records_it_as_a_capture(tmp_path: Path) -> None:
    tuned_folder(tmp_path)
    served(tmp_path, miss="default")
    example().row_sum[(4,)](torch.ones(4, 64), torch.empty(4), 4, 64)
    example().row_sum[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
    startup.uninstall()
    (missed,) = read_capture(tmp_path / "misses").classes
    assert (missed.sizes["N"], missed.problem) == (64, "")
    assert live_kernel(missed) is example().row_sum
    assert (missed.list_size, len(author_configs(missed))) == (6, 6)  # not the one that torch.compile sees


@pytest.mark.usefixtures("untimed")
def test_serving_with_policy_nearest_takes_the_nearest_tuned_launch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launches = of_kernel(captured(tmp_path, (4, 96), (4, 1024)), "row_sum")
    small, large = sorted(launches, key=lambda one: one.sizes["N"])
    configs = author_configs(small)
    rows = [ServingRow(one.sizes, (config,), {}) for one, config in ((small, configs[1]), (large, configs[4]))]
    groups = tuple(Group(one.key_values, one.dtypes, (), (row,)) for one, row in zip((small, large), rows, strict=True))
    write_table(tmp_path, kernel_of(launches, configs, groups=groups))
    served(tmp_path, miss="nearest", misses=None)
    module = example()
    for columns, expected in ((128, 1), (700, 4)):
        module.row_sum[(4,)](torch.ones(4, columns), torch.empty(4), 4, columns)
        assert module.row_sum.best_config == triton.Config(configs[expected].kwargs, num_warps=configs[expected].num_warps)
    assert "nearest captured launch" in caplog.text


@pytest.mark.usefixtures("untimed")
def test_serving_a_list_assigned_per_size_runs_configs_of_this_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_folder(tmp_path)  # with a BLOCK of 128
    kernel = example().row_sum
    whole = kernel.configs
    monkeypatch.setattr(kernel, "configs", whole)
    server = served(tmp_path, miss="default")
    blocks = []
    for block in (64, 128, 64):
        kernel.configs = [config for config in whole if config.kwargs["BLOCK"] == block]
        assert example().step(4, 96).tolist() == [566.0, 287.0, 582.0, 288.0]
        blocks.append(kernel.best_config.kwargs["BLOCK"])
    assert blocks == [64, 128, 64]
    assert (server.hits, server.misses) == (2, 1)  # the row falls back to 64; the other kernel is not in the table
    startup.uninstall()
    assert [config.kwargs["BLOCK"] for config in kernel.configs] == [64, 64]


def test_serving_with_policy_author_tunes_each_list_that_the_program_assigns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned_folder(tmp_path)
    kernel = example().row_sum
    whole = kernel.configs
    monkeypatch.setattr(kernel, "configs", whole)
    server = served(tmp_path, misses=None)
    for block in (64, 256, 64):  # the author's key is the same
        kernel.configs = [config for config in whole if config.kwargs["BLOCK"] == block]
        kernel[(4,)](torch.ones(4, 64), torch.empty(4), 4, 64)
        assert kernel.best_config.kwargs["BLOCK"] == block
    assert server.tunings == 2


def test_serving_with_policy_author_tunes_once_for_equal_lists_made_for_each_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned_folder(tmp_path)
    kernel = example().row_sum
    monkeypatch.setattr(kernel, "configs", kernel.configs)
    server = served(tmp_path, misses=None)
    for _ in range(3):
        kernel.configs = [triton.Config({"BLOCK": 16}, num_warps=warps) for warps in (2, 4)]
        kernel[(4,)](torch.ones(4, 64), torch.empty(4), 4, 64)
    assert server.tunings == 1


@pytest.mark.usefixtures("untimed")
def test_serving_a_kernel_with_a_single_config_is_no_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_folder(tmp_path)
    kernel = example().row_sum
    monkeypatch.setattr(kernel, "configs", kernel.configs[4:5])
    server = served(tmp_path, miss="error")
    y = torch.empty(4)
    kernel[(4,)](torch.ones(4, 64), y, 4, 64)
    assert (y.tolist(), server.misses) == ([64.0] * 4, 0)
    assert not (tmp_path / "misses").exists()


@pytest.mark.usefixtures("untimed")
def test_serving_a_launch_without_elements_is_no_miss(tmp_path: Path) -> None:
    tuned_folder(tmp_path)
    server = served(tmp_path, miss="error")
    example().row_sum[(0,)](torch.empty(0, 8), torch.empty(0), 0, 8)
    assert (server.misses, server.tunings) == (0, 0)
    assert server.counters.by_name() == {"served two_kernels.row_sum": 1, "missed two_kernels.row_sum": 0}


def test_serving_with_policy_error_names_kernel_and_sizes(tmp_path: Path) -> None:
    tuned_folder(tmp_path)
    served(tmp_path, miss="error", misses=None)
    with pytest.raises(LookupError, match=r"two_kernels.row_sum: no config for .*'N': 64.*on interpreter"):
        example().row_sum[(4,)](torch.ones(4, 64), torch.empty(4), 4, 64)


@pytest.mark.usefixtures("untimed")
def test_serving_sizes_that_the_key_omits_takes_the_nearest_row_of_the_group(tmp_path: Path) -> None:
    launches = of_kernel(captured(tmp_path, (2, 96), (64, 96)), "row_sum")
    few, many = sorted(launches, key=lambda one: one.sizes["M"])
    configs = author_configs(few)
    rows = (ServingRow(few.sizes, (configs[2],), {}), ServingRow(many.sizes, (configs[5],), {}))
    write_table(tmp_path, kernel_of(launches, configs, groups=(Group(few.key_values, few.dtypes, ("M",), rows),)))
    server = served(tmp_path, miss="error")
    module = example()
    for rows_given, expected in ((3, 2), (50, 5)):
        module.row_sum[(rows_given,)](torch.ones(rows_given, 96), torch.empty(rows_given), rows_given, 96)
        assert module.row_sum.best_config.kwargs["BLOCK"] == configs[expected].kwargs["BLOCK"]
    assert server.misses == 0


def test_serving_a_kernel_with_changed_source_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuned_folder(tmp_path, source_digest="0" * 12, bytecode_digest="0" * 16)
    server = served(tmp_path, miss="default", misses=None)
    for columns in (96, 64):
        example().row_sum[(4,)](torch.ones(4, columns), torch.empty(4), 4, columns)
    assert server.hits == 0
    assert caplog.text.count("its source has changed since it was tuned") == 1


def test_tables_of_two_gpus_that_are_written_at_once_are_both_in_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[threading.Thread] = []

    def read_before_another_writes(*args: Any, **options: Any) -> Any:
        try:
            return read_json(*args, **options)
        finally:
            if not writers:
                writers.append(threading.Thread(target=write_table, args=(tmp_path,), kwargs={"device": "gpu_b"}))
                writers[0].start()
                writers[0].join(0.5)

    monkeypatch.setattr(table, "read_json", read_before_another_writes)
    write_table(tmp_path, device="gpu_a")
    writers[0].join()
    assert None not in (read_table(tmp_path, "gpu_a"), read_table(tmp_path, "gpu_b"))


@pytest.mark.parametrize("source", [{}, {"source_digest": "0" * 12, "bytecode_digest": "0" * 16}], ids=["same", "other"])
def test_serving_a_kernel_that_was_captured_in_main_depends_on_its_source(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, source: dict[str, str]
) -> None:
    tuned_folder(tmp_path, module="__main__", package="", **source)
    server = served(tmp_path, miss="default", misses=None)
    example().row_sum[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
    assert server.hits == (not source)
    assert "its source has changed" not in caplog.text  # the program's file may hold any kernel of this name


def test_serving_another_package_version_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = example()
    tuned_folder(tmp_path, package="1.0")
    module.__version__ = "2.0"
    try:
        served(tmp_path, miss="default", misses=None)
        module.step(4, 96)
    finally:
        del module.__version__
    assert "tuned with version 1.0 of its package, here is 2.0" in caplog.text


def test_serving_a_table_of_another_gpu_names_that_gpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launches = of_kernel(captured(tmp_path), "row_sum")
    write_table(tmp_path, kernel_of(launches, author_configs(launches[0])), device="nvidia_h100")
    served(tmp_path, miss="default", misses=None)
    example().step(4, 96)
    assert "no table for interpreter, only for nvidia_h100" in caplog.text


def test_serving_a_changed_table_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuned_folder(tmp_path)
    path = tmp_path / "served" / "interpreter.json"
    path.write_text(path.read_text().replace('"BLOCK": 64', '"BLOCK": 32'))
    served(tmp_path, miss="default", misses=None)
    example().step(4, 96)
    assert "nothing is served" in caplog.text
    assert "manifest.json beside it names" in caplog.text


NO_CONFIGS: dict[str, Any] = {"sizes": {}, "configs": [], "evidence": {}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 2}, "format: 2: expected 1"),
        ({"kernels": [{"module": 3}]}, "kernels[0].module: 3: expected str"),
        ({"groups": [{"key": [], "dtypes": [], "split": [], "rows": []}]}, "kernels[0].groups[0].rows: []: expected"),
        ({"groups": [{"key": [], "dtypes": [], "split": [], "rows": [NO_CONFIGS]}]}, "groups[0].rows[0].configs: []: expected"),
        ({"portfolio": [{"num_warps": 4}]}, "kernels[0].portfolio[0].kwargs: missing"),
        ({"device": "nvidia_h100"}, "device: 'nvidia_h100': expected 'interpreter', by the file's name"),
    ],
)
def test_serving_a_damaged_table_with_its_manifest_warns_in_one_line(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    tuned_folder(tmp_path)
    path = tmp_path / "served" / "interpreter.json"
    stored = json.loads(path.read_text())
    target = stored if change.keys() <= stored.keys() else stored["kernels"][0]
    target |= change
    path.write_text(json.dumps(stored))
    (path.parent / MANIFEST).write_text(json.dumps({"tables": {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}}))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: .*{re.escape(problem)}"):
        read_table(tmp_path, "interpreter")


def test_serving_with_a_manifest_of_another_table_raises(tmp_path: Path) -> None:
    tuned_folder(tmp_path)
    with pytest.raises(ValueError, match=r"^manifest: abc: .* has tables of SHA-256 \w+$"):
        served(tmp_path, manifest="abc")


def test_serving_with_its_manifest_logs_the_digest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    launches = of_kernel(captured(tmp_path), "row_sum")
    digest = write_table(tmp_path, kernel_of(launches, author_configs(launches[0])))
    caplog.set_level(logging.INFO, "kerneltune.adopt")
    server = served(tmp_path, manifest=digest, miss="default", misses=None)
    example().step(4, 96)
    assert server.hits == 1
    assert digest in caplog.text


class OutOfResources(Exception):  # noqa: N818
    """Stands for Triton's, which is known by its name."""


def test_serving_a_config_that_cannot_launch_falls_back_to_the_next_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = tuned_folder(tmp_path)
    module = example()
    launched = []
    original = module.row_sum.fn.run

    def run(*args: Any, **kwargs: Any) -> Any:
        launched.append((kwargs["BLOCK"], kwargs["num_warps"]))
        if len(launched) < 3:
            raise OutOfResources("shared memory")
        return original(*args, **kwargs)

    monkeypatch.setattr(module.row_sum.fn, "run", run)
    served(tmp_path, miss="error")
    monkeypatch.setattr(startup.server(), "miss", "default")
    for _ in range(2):
        module.row_sum[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
    expected = [(one.kwargs["BLOCK"], one.num_warps) for one in order[:3]]
    assert launched == [*expected, expected[2]]
    assert caplog.text.count("fails here (OutOfResources: shared memory): falling back to") == 2
    counts = startup.server().counters.by_name()  # failed tries are no launches
    assert (counts["served two_kernels.row_sum"], counts["fell back two_kernels.row_sum"]) == (0, 2)


def test_config_that_fails_in_two_threads_at_once_uses_up_one_fallback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = tuned_folder(tmp_path)
    module = example()
    launched: list[int] = []
    both = threading.Barrier(2)

    def run(*_: Any, **kwargs: Any) -> None:
        if (kwargs["BLOCK"], kwargs["num_warps"]) == (order[0].kwargs["BLOCK"], order[0].num_warps):
            both.wait(timeout=60)
            raise OutOfResources("shared memory")
        launched.append(kwargs["BLOCK"])

    monkeypatch.setattr(module.row_sum.fn, "run", run)
    served(tmp_path, miss="error")
    monkeypatch.setattr(startup.server(), "miss", "default")
    with ThreadPoolExecutor(2) as pool:
        launches = [pool.submit(module.row_sum[(4,)], torch.ones(4, 96), torch.empty(4), 4, 96) for _ in range(2)]
        for launch in launches:
            launch.result(timeout=800)
    assert launched == [order[1].kwargs["BLOCK"]] * 2
    assert caplog.text.count("falling back to") == 1


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("is_allowed", [True, False])
def test_serving_obeys_early_config_prune_but_no_performance_model(
    is_allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = tuned_folder(tmp_path)[0]
    kernel = example().row_sum
    block = chosen.kwargs["BLOCK"]

    def prune(configs: list[Any], _named: Any, **_given: Any) -> list[Any]:
        return [config for config in configs if is_allowed or config.kwargs["BLOCK"] != block]

    monkeypatch.setattr(kernel, "early_config_prune", prune)
    monkeypatch.setattr(kernel, "perf_model", lambda **arguments: float(arguments["BLOCK"] == block))  # says: the slowest
    monkeypatch.setattr(kernel, "configs_top_k", 1)
    server = served(tmp_path, miss="default")
    assert example().step(4, 96).tolist() == [566.0, 287.0, 582.0, 288.0]
    assert server.hits == 1
    assert (kernel.best_config.kwargs["BLOCK"] == block) is is_allowed


def test_serving_a_launch_with_another_error_raises_and_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_folder(tmp_path)
    module = example()
    served(tmp_path)

    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(module.row_sum.fn, "run", fail)
    for columns in (96, 64):  # tuned, and chosen by the author's autotuner
        with pytest.raises(RuntimeError, match="illegal memory access"):
            module.row_sum[(4,)](torch.ones(4, columns), torch.empty(4), 4, columns)
    assert not any(startup.server().counters.by_name().values())


def test_serving_a_config_calls_its_pre_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_folder(tmp_path, chosen=2)
    module = example()
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(module.row_sum.configs[2], "pre_hook", lambda named: seen.append(dict(named)))
    served(tmp_path)
    module.row_sum[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
    assert [(one["N"], one["BLOCK"]) for one in seen] == [(96, 128)]


def test_serving_in_a_graph_capture_uses_the_nearest_config_and_tunes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untimed: None
) -> None:
    tuned_folder(tmp_path, chosen=4)
    server = served(tmp_path, misses=None)
    monkeypatch.setattr(program, "is_capturing", lambda: True)
    example().row_sum[(4,)](torch.ones(4, 64), torch.empty(4), 4, 64)
    assert example().row_sum.best_config.kwargs == {"BLOCK": 256}
    assert server.tunings == 0


def test_serving_from_many_threads_gives_right_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_folder(tmp_path)
    module = example()
    launched: list[tuple[int, int]] = []
    monkeypatch.setattr(module.row_sum.fn, "run", lambda *args, **kwargs: launched.append((args[3], kwargs["BLOCK"])))
    served(tmp_path, miss="nearest", misses=None)
    x, y = torch.ones(4, 512), torch.empty(4)

    def work(columns: int) -> None:
        for _ in range(200):
            module.row_sum[(4,)](x, y, 4, columns)

    threads = [threading.Thread(target=work, args=(columns,)) for columns in (96, 64, 128, 256)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(launched) == 800
    assert set(launched) == {(columns, 128) for columns in (96, 64, 128, 256)}


class OwnAutotuner(triton.runtime.autotuner.Autotuner):
    """As packages have them: looks something up, then calls Triton's run."""

    looked_up = 0

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Count, then launch."""
        type(self).looked_up += 1
        return super().run(*args, **kwargs)


def test_serving_a_subclass_that_calls_super_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned_folder(tmp_path)
    module = example()
    monkeypatch.setattr(module.row_sum, "__class__", OwnAutotuner)
    server = served(tmp_path, miss="error")
    module.row_sum[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
    assert (server.hits, OwnAutotuner.looked_up) == (1, 1)


def test_serving_a_kernel_defined_later_lists_one_config_before_its_launch(tmp_path: Path) -> None:
    order = tuned_folder(tmp_path)
    earlier = example().row_sum
    listed = list(earlier.configs)
    served(tmp_path)
    later = triton.autotune(configs=listed, key=["N"])(earlier.fn)
    assert [config.kwargs for config in later.configs] == [order[0].kwargs]
    assert isinstance(later, triton.runtime.autotuner.Autotuner)
    assert [config.kwargs for config in earlier.configs] == [order[0].kwargs]
    startup.uninstall()
    assert earlier.configs == listed


def test_serving_imports_no_heavy_module(tmp_path: Path) -> None:
    tuned_folder(tmp_path)
    code = (
        "import sys; from kerneltune.adopt import install; install(sys.argv[1]);"
        "import kerneltune.adopt.serving, kerneltune.adopt.recorder;"
        "print([m for m in ('torch', 'triton', 'numpy', 'pandas', 'optuna', 'rich', 'typer', 'safetensors') if m in sys.modules])"
    )
    assert run_python(code, str(tmp_path), interpreter=sys.executable).stdout == "[]\n"


def test_install_of_a_folder_without_table_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tuned configs: expected a folder that `kerneltune tune` wrote"):
        startup.install(tmp_path)


def test_install_with_an_unknown_policy_raises(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    with pytest.raises(ValueError, match="miss: 'guess': expected one of author, nearest, default, error"):
        startup.install(tmp_path, miss="guess")


def test_serving_another_folder_in_the_same_process_serves_its_configs(tmp_path: Path) -> None:
    module, chosen = example(), []
    listed = list(module.row_sum.configs)
    for folder, place in (("a", 3), ("b", 5)):
        tuned_folder(tmp_path / folder, chosen=place)
    for folder in ("a", "b"):
        startup.install(tmp_path / folder, miss="default")
        module.row_sum[(4,)](torch.ones(4, 96), torch.empty(4), 4, 96)
        chosen.append(module.row_sum.best_config)
    assert chosen == [listed[3], listed[5]]
