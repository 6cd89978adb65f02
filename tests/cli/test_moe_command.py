"""`kerneltune moe`: the table of training steps, from records."""

from pathlib import Path

import pytest
import torch
from command_line import record, refused, run
from literal_records import changed

from kerneltune import records
from kerneltune.workloads.moe_memory import Memory, memory_text
from kerneltune.workloads.moe_table import step_markdown, step_rows, step_text

STEP = {"op": "moe_step", "case": "some-4096", "axes": {"M": 4096, "K": 64, "N": 64, "E": 2}, "family": "moe_training"}
TIMES = {"baseline": 1000.0, "torchao_rowwise": 1200.0, "tensorwise": 500.0, "tensorwise_gemms": 300.0, "tensorwise_casts": 150.0,
         "tensorwise_cached": 400.0, "tensorwise_refresh": 80.0, "tensorwise_compiled": 444.0, "rowwise": 625.0}  # fmt: skip
RECORDS = [
    record(us, variant=variant, options={"groups": "zipf"}, **STEP | {"pct_ceiling": 1e4 / us}) for variant, us in TIMES.items()
]


def test_a_rest_of_nothing_has_no_sign() -> None:
    whole = [changed(r, time_us=449.7 if r.variant == "tensorwise" else r.time_us) for r in RECORDS]
    (line,) = (line for line in step_text(step_rows(whole)).splitlines() if line.startswith("tensorwise  "))
    assert line.endswith(" 300     0")


def test_rows_of_the_table() -> None:
    tensorwise, rowwise = step_rows(RECORDS)
    assert (tensorwise.bf16, tensorwise.torchao, tensorwise.step, tensorwise.products) == (1000, 1200, 500, 300)
    assert tensorwise.bound == 300 + 500 * 20 / 100
    assert tensorwise.cached == 400 + 80 / 8
    assert tensorwise.other == 50
    assert (rowwise.step, rowwise.bound, rowwise.cached, rowwise.other) == (625, None, None, None)
    assert step_rows(RECORDS, 1)[0].cached == 480


def test_the_table_as_text() -> None:
    text = step_text(step_rows(RECORDS))
    assert text == (
        "some-4096, zipf groups: bf16 1000 µs, torchao 1200 µs\n"
        "recipe     step bound    % x bf16 x torchao cached x bf16 casts products other\n"
        "tensorwise  500   400 80.0   2.00      2.40    410   2.44   150      300    50\n"
        "rowwise     625              1.60      1.92\n"
        "compiled: tensorwise 444\n"
        "\n"
        "Times in µs. bound, and its share of the step: the products, and the casts'\n"
        "fewest bytes at the ceiling's speed. cached: weights cast once in 8 steps.\n"
        "other: the step less casts and products, which are timed by themselves.\n"
        "compiled: the step under torch.compile. Times are compared where they are of one\n"
        "run; blank: not measured in it.\n"
        "tensorwise: 2.00x bf16 (1 case), 2.40x torchao (1 case)\n"
        "rowwise: 1.60x bf16 (1 case), 1.92x torchao (1 case)\n"
    )
    assert max(map(len, text.splitlines())) <= 80
    alone = [r for r in RECORDS if r.variant != "torchao_rowwise"]
    assert step_text(step_rows(alone)).splitlines()[0] == "some-4096, zipf groups: bf16 1000 µs, torchao not measured"
    lines = step_markdown(step_rows(RECORDS, 4), 4).splitlines()
    assert lines[2].startswith("| some-4096 | zipf | 1000 | 1200 | tensorwise | 500 |") and lines[2].endswith("| 444 |")
    assert "cached: weights cast once in 4 steps." in lines[-1]


def test_means_stand_together() -> None:
    of_two = [r for r in RECORDS if r.variant != "rowwise"] + [changed(RECORDS[2], variant="delayed")]
    last = step_text(step_rows(of_two)).splitlines()[-3:]
    assert [line.split(":")[0] for line in last] == ["run; blank", "tensorwise", "delayed"]


def test_records_measured_otherwise_are_told_apart() -> None:
    slower = [changed(r, policy="eager", time_us=(r.time_us or 0) * (1 if r.variant == "baseline" else 3)) for r in RECORDS]
    rows = step_rows([*RECORDS, *slower])
    text, markdown = step_text(rows), step_markdown(rows)
    titles = [line for line in text.splitlines() if line.startswith("some-4096")]
    assert titles[0].startswith("some-4096, zipf groups, cold: bf16 1000 µs")
    assert titles[1].startswith("some-4096, zipf groups, eager: bf16 1000 µs")
    assert "tensorwise, cold: 2.00x bf16 (1 case)" in text and "tensorwise, eager: 0.67x bf16 (1 case)" in text
    assert "| some-4096, cold | zipf |" in markdown and "| some-4096, eager | zipf |" in markdown
    elsewhere = step_text(step_rows([*RECORDS, *(changed(r, device="NVIDIA B200") for r in RECORDS)]))
    assert "some-4096, zipf groups, NVIDIA B200: bf16" in elsewhere and "(2 cases)" not in elsewhere


def test_a_page_shows_whole_steps_only(tmp_path: Path) -> None:
    records.append(tmp_path / "moe.jsonl", RECORDS)
    assert run("report", tmp_path / "moe.jsonl", "--results", tmp_path, "-o", tmp_path / "page.html").exit_code == 0
    text = (tmp_path / "page.html").read_text()
    parts = ["tensorwise_gemms", "tensorwise_casts", "tensorwise_cached", "tensorwise_refresh"]
    assert [name for name in TIMES if f'"{name}"' not in text] == parts


def test_a_peer_of_another_run_is_named() -> None:
    mixed = [changed(r, commit="f00d") if r.variant == "torchao_rowwise" else r for r in RECORDS]
    assert step_text(step_rows(mixed)).splitlines()[0].endswith("bf16 1000 µs, torchao 1200 µs, of commit f00d")
    assert "| 1200 (f00d) |" in step_markdown(step_rows(mixed))


def test_times_of_different_runs_are_not_compared() -> None:
    later = [changed(r, unit="b" if r.variant in ("baseline", "rowwise") else "a") for r in RECORDS]
    tensorwise, rowwise = step_rows(later)
    assert (tensorwise.times_bf16, tensorwise.times_cached, tensorwise.times_torchao) == (None, None, 2.4)
    assert (tensorwise.bf16, tensorwise.cached, tensorwise.bound) == (1000, 410, 400)
    assert (rowwise.times_bf16, rowwise.times_torchao) == (1.6, None)
    apart = [changed(r, commit="f00d") if r.variant in ("tensorwise_gemms", "tensorwise_refresh") else r for r in RECORDS]
    assert (step_rows(apart)[0].bound, step_rows(apart)[0].cached) == (None, None)


def test_the_command_reads_records(tmp_path: Path) -> None:
    file = tmp_path / "moe_training.jsonl"
    records.append(file, RECORDS)
    result = run("moe", "--from", file)
    assert result.exit_code == 0 and result.stdout == step_text(step_rows(RECORDS), width=100)
    output = tmp_path / "table.md"
    assert run("moe", "--from", file, "--format", "markdown", "--output", output).exit_code == 0
    assert output.read_text() == step_markdown(step_rows(RECORDS))
    other = tmp_path / "other.jsonl"
    records.append(other, [record()])
    assert refused("moe", "--from", other).startswith("error: no records of training steps: run `kerneltune sweep moe_training`")


def test_the_table_of_memory() -> None:
    found = {"bf16": Memory(470_000_000, 0, 2_000_000_000), "tensorwise, cached": Memory(235_400_000, 1_880_000_000, 900_000_000)}
    assert memory_text(found) == (
        "                    kept MB  workspace MB  peak MB\n"
        "bf16                    470             0     2000\n"
        "tensorwise, cached      235          1880      900\n"
    )


def test_memory_takes_a_case_and_a_gpu() -> None:
    assert refused("moe", "--memory", "softmax").startswith("error: memory: 'softmax': expected one of deepseek-v3-16b-up-4096")
    if not torch.cuda.is_available():
        assert "GPU" in refused("moe", "--memory", "qwen3-30b-a3b-down-4096")


@pytest.mark.gpu
def test_fp8_keeps_less_for_the_backward() -> None:
    result = run("moe", "--memory", "deepseek-v3-16b-up-32768")
    kept = {line.rsplit(maxsplit=3)[0]: int(line.rsplit(maxsplit=3)[1]) for line in result.stdout.splitlines()[1:]}
    M, K, E, N = 32768, 2048, 8, 1408
    assert kept["bf16"] == pytest.approx(2 * M * K / 1e6, abs=2)
    assert kept["tensorwise, cached"] == pytest.approx(M * K / 1e6, abs=2)
    assert kept["tensorwise"] == pytest.approx((M * K + E * K * N) / 1e6, abs=2)
