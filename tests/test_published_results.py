"""Results in README and notes: they equal those of the records."""

import json
import re
from statistics import geometric_mean

from doc_blocks import ROOT

from kerneltune import records
from kerneltune.cli.files import selected
from kerneltune.plan import Selection
from kerneltune.reporting.pairing import ab_rows, best_peers

RESULTS = {
    "RMSNorm forward to fp8 and its transpose": Selection("rmsnorm", ops=("rmsnorm_fwd",), quants=("fp8_t",)),
    "RMSNorm backward": Selection("rmsnorm", ops=("rmsnorm_bwd",)),
    "RMSNorm forward": Selection("rmsnorm", ops=("rmsnorm_fwd",), quants=("none",)),
    "fp8 row-wise quantization": Selection("fp8_rowwise"),
    "fp8 casts of expert weights": Selection("fp8_weights"),
    "fp8 grouped product": Selection("fp8_grouped_gemm"),
    "int4 weights, 1 to 32 tokens": Selection("weight_only", cases=("*-n1", "*-n8", "*-n16", "*-n32")),
    "int4 experts": Selection("int4_experts"),
}
"""The records of each row of README's table of results."""


def test_times_of_models_equal_those_of_the_records() -> None:
    """The page's table has every case, and README the compiled speed-ups of two of them."""
    rows = [row for row in records.load(ROOT / "results" / "nvidia_h200" / "model_training.jsonl") if row.time_us]
    ms = {(row.case, row.variant): row.time_us / 1000 for row in rows if row.time_us}
    order = ("deepseek-v3-16b", "deepseek-v3-671b", "qwen3-30b-a3b", "llama-3-8b")
    cases = [f"{model}{mode}" for model in order for mode in ("", "-compiled")]
    shown = re.findall(
        r"^\|[^|]*\| (?:eager|compiled) \|(.*)\|$", (ROOT / "docs/notes/model_training.md").read_text(), re.MULTILINE
    )
    assert len(shown) == len(cases)
    for case, line in zip(cases, shown, strict=True):
        expected = []
        for variant in ("baseline", "tensorwise", "tensorwise_dense", "torchao", "torchao_dense"):
            time_ms = ms.get((case, variant))
            ours = f" (**{ms[case, 'baseline'] / time_ms:.2f}**)" if time_ms and variant.startswith("tensorwise") else ""
            expected.append(f"{time_ms:.1f}{ours}" if time_ms else "")
        assert [cell.strip() for cell in line.split("|")] == expected, case
    text = " ".join((ROOT / "README.md").read_text().split())
    for name, case in (("DeepSeek-V3 16B", "deepseek-v3-16b-compiled"), ("Llama 3 8B", "llama-3-8b-compiled")):
        best, torchao = (
            ms[case, "tensorwise_dense"],
            min(ms[key] for key in ms if key[0] == case and key[1].startswith("torchao")),
        )
        assert f", {name} | {ms[case, 'baseline'] / best:.2f}x, {torchao / best:.2f}x | bf16, torchao |" in text


def test_readme_results_equal_those_of_the_records() -> None:
    shown = re.findall(r"^\| (\D.*), (\d+) cases(?: \(.*\))? \| (\d\.\d\d)x \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [name for name, *_ in shown] == list(RESULTS)
    for name, cases, speedup in shown:
        rows = selected(records.load(ROOT / "results" / "nvidia_h200" / f"{RESULTS[name].family}.jsonl"), RESULTS[name])
        pairs = ab_rows(best_peers(rows), [row for row in rows if row.variant == "optimized"])
        speedups = [pair.speedup for pair in pairs if pair.speedup]
        assert (len(speedups), f"{geometric_mean(speedups):.2f}") == (int(cases), speedup), name


def test_speedups_of_linear_layers_equal_those_of_the_record() -> None:
    """The page's table has, for each layer, the paired speedups by tokens, and their mean over all keys."""
    models = json.loads((ROOT / "results" / "nvidia_h200" / "adopted_fp8_linear.json").read_text())["models"]
    page = (ROOT / "docs/notes/adoption.md").read_text()
    table = page[page.index("adopted_fp8_linear.json") :].splitlines()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line.startswith("|")][: len(models) + 2]
    for model, (name, *shown, mean) in zip(models, lines[2:], strict=True):
        speedups = {row["tokens"]: row["speedup"] for row in model["rows"]}
        assert name == f"{model['model']}, {model['sizes']['N']} × {model['sizes']['K']}"
        assert shown == [f"{speedups[int(tokens)]:.2f}x" for tokens in lines[0][1:-1]], name
        assert (len(speedups), mean) == (18, f"{geometric_mean(speedups.values()):.2f}x"), name


def test_times_of_fused_moe_equal_those_of_the_record() -> None:
    """The page's table has, for each model, times under the own config and tuned, and the median ratio."""
    recorded = json.loads((ROOT / "results" / "nvidia_h200" / "adopted_fused_moe.json").read_text())
    page = (ROOT / "docs/notes/adoption.md").read_text()
    table = page[page.index("fused_moe.json") :].splitlines()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line.startswith("|")][:14]
    tokens = lines[0][1:]
    for place, model in enumerate(recorded["models"]):
        own, tuned, ratio = lines[3 * place + 2 : 3 * place + 5]
        rows = {str(row["tokens"]): row for row in model["rows"]}
        assert own[0].startswith(model["model"])
        for at, count in enumerate(tokens, 1):
            expected = ("", "", "")
            if row := rows.get(count):
                expected = (f"{row['own_us']:.1f}", f"{row['time_us']:.1f}", f"{row['speedup']:.2f}x")
            assert (own[at], tuned[at], ratio[at]) == expected, (model["model"], count)
