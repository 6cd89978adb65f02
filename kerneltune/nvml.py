"""What NVML is asked about the GPU of this process: its handle, and the slowdowns that make a round of times invalid.

NVML counts all GPUs of a host, whatever CUDA_VISIBLE_DEVICES says, so a GPU is asked for by its id and never by torch's index.
"""

from typing import Any

SLOWDOWNS = {0x8: "hardware slowdown", 0x20: "software thermal"}
"""Bits of NVML's clocks event reasons: heat, or the power brake. Rounds of times taken meanwhile are repeated.

The power cap is none of them: long kernels hold a GPU at it all the time.
"""


def handle() -> Any:
    """Of the GPU that torch runs on now.

    Raises:
        pynvml.NVMLError: no NVML, or it does not know the GPU.
    """
    import pynvml
    import torch

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def slowed_down(reasons: int) -> bool:
    """Whether NVML's clocks event reasons are such that a round is repeated."""
    return any(reasons & bit for bit in SLOWDOWNS)
