"""New records in the formats of Bencher, github-action-benchmark and the PyTorch HUD."""

import json

import pytest
from gate_rows import LABEL, record, untimed

from kerneltune.gating.outputs import FORMATS, action_benchmark, bencher, hud

ROWS = [record(50.0, samples_us=[[50.0, 50.25], [49.75]], n=3), untimed("failed", quant="none"), record(70.0, variant="eager")]


def test_bencher_has_latency_in_ns_with_its_interval() -> None:
    found = json.loads(bencher(ROWS))
    assert list(found) == [f"{LABEL} optimized", f"{LABEL} eager"]
    assert found[f"{LABEL} optimized"] == {
        "latency": {"value": 50000.0, "lower_value": 49500.0, "upper_value": 50500.0},
        "throughput": {"value": 1e12},
    }


def test_action_benchmark_is_a_list_of_smaller_is_better() -> None:
    found = json.loads(action_benchmark(ROWS))
    assert found[0] == {
        "name": f"{LABEL} optimized", "unit": "µs", "value": 50.0, "range": "± 0.5",
        "extra": "config -\ncommit 0\nGPU NVIDIA H200 ",
    }  # fmt: skip
    assert len(found) == 2
    assert {"name", "unit", "value", "range", "extra"} == set(found[1])


def test_hud_keeps_all_samples() -> None:
    found = json.loads(hud(ROWS))
    assert [(r["metric"]["name"], r["metric"]["benchmark_values"]) for r in found[:2]] == [
        ("latency", [50.0, 50.25, 49.75]), ("bandwidth", [1000.0]),
    ]  # fmt: skip
    assert found[0]["model"] == {"name": "rmsnorm_fwd te-8192x4096", "type": "kernel", "backend": "optimized"}
    assert found[0]["benchmark"]["extra_info"]["M"] == "8192"
    assert found[2]["metric"]["benchmark_values"] == [70.0]


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_two_gpus_have_names_of_their_own(name: str) -> None:
    text = FORMATS[name]([record(), record(device="NVIDIA B200")])
    assert "NVIDIA B200" in text
    assert FORMATS[name]([]).strip() in ("{}", "[]")
