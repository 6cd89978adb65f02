"""cache explain and cases: the lines that they print, the file that they write, and their errors."""

import json
from pathlib import Path

import pytest
from command_line import refused, run

FIELDS = {"model_type": "qwen3", "hidden_size": 2048, "num_attention_heads": 16, "head_dim": 128, "intermediate_size": 6144,
          "rms_norm_eps": 1e-6}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "source"),
    [
        ("llama4-16384x5120", "the cache's entry for exactly this case"),
        ("M=12000,N=5120", "the cache's nearest entry, that of M=16384 N=5120 uint8, log2 distance 0.4"),
        ("M=12000,N=5136", "the default: nvidia_h200 has no entry for this case or near it, at most 4 away in log2 of M"),
    ],
)
def test_explain_names_the_source_of_a_config(case: str, source: str) -> None:
    lines = run("cache", "explain", "fp8_transpose_2d", case, "--gpu", "nvidia_h200").stdout
    assert [line.split()[0] for line in lines.splitlines() if line[0] != " "] == ["case", "config", "from"]
    assert "config    rows=64 cols=" in lines
    assert f"from {source}" in " ".join(lines.split())


def test_explain_of_a_size_whose_band_has_no_entry_names_the_band() -> None:
    lines = run("cache", "explain", "int4_fastest_gemm", "N=200,M=57344,K=8192,group=128", "--gpu", "nvidia_h200").stdout
    assert "from the default: nvidia_h200 has no entry for this case or near it, as the case's band is N from 129" in " ".join(
        lines.split()
    )


def test_explain_accepts_sizes_as_separate_arguments_and_short_dtypes() -> None:
    arguments = ("fp8_tensorwise_2d", "--gpu", "nvidia_h200", "--dtype")
    whole = run("cache", "explain", *arguments, "float16", "M=4096,K=4096")
    apart = run("cache", "explain", *arguments, "fp16", "M=4096", "K=4096")
    assert (apart.exit_code, apart.stdout) == (0, whole.stdout)


def test_explain_accepts_options_beside_sizes() -> None:
    asked = ("cache", "explain", "fp8_grouped_gemm", "--gpu", "nvidia_h200", "M=32768", "N=3584", "K=2048", "E=64")
    assert "product=rows" in run(*asked).stdout
    assert "product=weights" in run(*asked, "product=weights").stdout
    assert "product: 'weight': did you mean weights? expected one of rows, weights" in refused(*asked, "product=weight")
    layouts = ("fp8_tensorwise_2d", "--gpu", "nvidia_h200", "M=16,K=24,layout=both")
    assert "layout=both" in run("cache", "explain", *layouts).stdout


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("rmsnorm_fwd M=1 N=4194304", "expected sizes that some config can run: 32768 elements per thread"),
        ("rmsnorm_bwd M=9 N=1048577", "expected sizes that some config can run: 16384 elements per thread"),
        ("int4_gemm N=3 M=64 K=33", "unsupported: k must be a multiple of the group and of 32, got k=33 group=64"),
        ("int4_gemm N=3 M=0 K=64", "unsupported: m must be even and at least 2, got m=0"),
    ],
)
def test_explain_of_sizes_that_no_config_runs_fails(case: str, text: str) -> None:
    assert text in refused("cache", "explain", *case.split(), "--gpu", "nvidia_h200")


def test_explain_of_an_unknown_axis_or_a_missing_size_fails() -> None:
    arguments = ("cache", "explain", "rmsnorm_fwd", "--gpu", "nvidia_h200")
    assert "N: not given: expected a size for each of M, N" in refused(*arguments, "M=5000")
    error = refused(*arguments, "M=5000", "N=5120", "dtype=bf16")
    assert "axis: 'dtype': expected one of M, N, or an option: zero_centered, fp8_format, row_pad" in error


def test_explain_of_a_stale_entry_prints_that_it_is_stale(configs_dir: Path) -> None:
    from dataclasses import replace

    from kerneltune import cache
    from kerneltune.files import data_root

    entry = cache.load("fp8_transpose_2d", "nvidia_h200", data_root("configs"))[0]
    cache.store("nvidia_h200", replace(entry, evidence=dict(entry.evidence) | {"source_hash": "0123456789ab"}))
    case = entry.case
    sizes = [f"{name}={value}" for name, value in (*case.axes, *case.options)]
    result = run("cache", "explain", "fp8_transpose_2d", *sizes, "--dtype", case.dtype, "--quant", case.quant)
    assert "for exactly this case; stale: source_hash 0123456789ab is now" in " ".join(result.stdout.split())


def test_explain_of_an_unknown_case_names_the_nearest() -> None:
    error = refused("cache", "explain", "fp8_transpose_2d", "llama4-16384x512", "--gpu", "nvidia_h200")
    assert "case: 'llama4-16384x512'" in error
    assert "did you mean llama4-16384x5120?" in error
    error = refused("cache", "explain", "fp8_transpose_2d", "M=1,N=1", "--gpu", "NVIDIA H200")
    assert error == "error: gpu: 'NVIDIA H200': expected the name of a folder, like nvidia_h200"


@pytest.mark.parametrize(
    ("gpu", "source"),
    [
        ("nvidia_b200", "nearest entry, that of M=16384 N=5120 uint8 on nvidia_h200, log2 distance 0.00"),
        ("nvidia_l4", "the default: nvidia_l4 has no config of fp8_transpose_2d, and its architecture is unknown here, so that"),
        ("nvidia_h20", "a call there may take another GPU's config (known: nvidia_h100_80gb_hbm3, nvidia_h200, nvidia_b200)"),
        ("interpreter", "the default: interpreter has no config of fp8_transpose_2d, and no other GPU's serves this case"),
    ],
)
def test_explain_for_a_gpu_without_configs_names_what_a_call_would_get(gpu: str, source: str) -> None:
    asked = ("cache", "explain", "fp8_transpose_2d", "llama4-16384x5120", "--gpu", gpu)
    if gpu == "nvidia_b200":
        with pytest.warns(UserWarning, match="those of nvidia_h200, the nearest known architecture, serve"):
            result = run(*asked)
    else:
        result = run(*asked)
    assert result.exit_code == 0
    assert source in " ".join(result.stdout.split())


def test_cases_writes_a_sweep_file_that_loads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    printed = run("cases", "--model", str(tmp_path / "config.json"), "--tokens", "4096").stdout
    run("cases", "--model", str(tmp_path), "--tokens", "4096", "-o", str(tmp_path / "made.yaml"))
    assert (tmp_path / "made.yaml").read_text() == printed
    assert "{name: norm-4096, op: rmsnorm_fwd, M: 4096, N: 2048," in printed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--tokens", "4k"], "tokens: '4k': expected integers"),
        (["--tokens", "0"], "tokens: '0'"),
        (["--batch", "1,,2"], "batch: '1,,2'"),
        (["--ep", "0"], "ep: 0: expected 1 or more"),
        (["--ep", "2"], "ep: 2: expected 1, as "),
    ],
)
def test_cases_with_bad_options_fails_and_writes_nothing(options: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    output = tmp_path / "made.yaml"
    assert text in refused("cases", "--model", str(tmp_path / "config.json"), "-o", str(output), *options)
    (tmp_path / "bad.json").write_text('{"hidden_size": 12.5}')
    error = refused("cases", "--model", str(tmp_path / "bad.json"), "-o", str(output))
    assert f"{tmp_path / 'bad.json'}: hidden_size: 12.5: expected an integer" in error
    assert not output.exists()


def test_tune_with_neither_family_nor_model_file_fails() -> None:
    assert "expected either a family or --model FILE" in refused("tune")
    assert "cannot read none.json" in refused("tune", "--model", "none.json")


@pytest.mark.parametrize(("options", "tuned"), [([], ("optimized",)), (["--variant", "base*"], ("base*",))])
def test_tune_of_a_model_tunes_variants_that_calls_run(
    options: list[str], tuned: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kerneltune.plan import Plan, Selection

    selected: list[Selection] = []

    def stop(plan: Plan, _progress: object) -> None:
        selected.append(plan.selection)
        raise ValueError("stopped")

    monkeypatch.setattr("kerneltune.tune.run.run_tune", stop)
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    result = run("tune", "--model", tmp_path / "config.json", "--results", tmp_path, *options)
    assert (result.exit_code, result.stdout, result.stderr.splitlines()[-1]) == (2, "", "error: stopped")
    assert [selection.variants for selection in selected] == [tuned]
