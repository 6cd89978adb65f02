"""Run a gated-linear-attention layer of flash-linear-attention 0.6.0, forward and backward; imports no kerneltune.

`python gla_layer.py NAME [RESULTS.pt [EXPECTED.pt]]` prints a line of JSON: seconds, seconds in the autotuner, the step's
GPU time, configs, and the distance of results from the expected results. Needs a GPU, flash-linear-attention and einops.
"""

import json
import sys
import time

BEGAN = time.perf_counter()

import torch  # noqa: E402
from compare_runs import differences  # noqa: E402
from meter import Meter, chosen_configs, serving_counts  # noqa: E402

METER = Meter().start()

from fla.layers import GatedLinearAttention  # noqa: E402

IMPORTED = time.perf_counter()
BATCH, TOKENS, HIDDEN, HEADS = 4, 4096, 2048, 16


def main(name: str, results: str = "", expected: str = "") -> None:
    """Run the layer and print the line."""
    torch.manual_seed(0)
    layer = GatedLinearAttention(hidden_size=HIDDEN, num_heads=HEADS, expand_k=1.0, expand_v=1.0).to("cuda", torch.bfloat16)
    x = torch.randn(BATCH, TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> torch.Tensor:
        out: torch.Tensor = layer(x)[0]
        out.float().square().mean().backward()
        return out

    out = step()
    torch.cuda.synchronize()
    ready = time.perf_counter()
    first = (METER.total_s, METER.launch_s, METER.launches)
    found = {name: p.grad.float().cpu() for name, p in layer.named_parameters() if p.grad is not None}
    found |= {"out": out.detach().float().cpu(), "x": x.grad.float().cpu()} if x.grad is not None else {}
    apart = differences(found, results, expected)
    row = {
        "what": name, "import_s": IMPORTED - BEGAN, "process_s": ready - BEGAN, "autotuner_s": first[0],
        "of_it_compiling_and_launching_s": first[1], "launches": first[2], "step_gpu_ms": gpu_ms(step),
        "largest_difference": max(apart.values(), default=None), "serving": serving_counts(), "configs": chosen_configs(),
    }  # fmt: skip
    print(json.dumps({key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}))


def gpu_ms(step: object, times: int = 20) -> float:
    """Return the GPU time of a step in ms, the mean of `times` steps after a warm-up."""
    assert callable(step)
    for _ in range(3):
        step()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(200_000_000)
    start.record()
    for _ in range(times):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


if __name__ == "__main__":
    main(*sys.argv[1:])
