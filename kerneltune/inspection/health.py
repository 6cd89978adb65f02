"""Report how an NVIDIA GPU's state affects times measured on it: clocks, power, memory, sharing.

NVML is an argument, so that tests can replace it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from kerneltune.device import SLOWDOWNS, slowed_down
from kerneltune.wording import first_of

Query = Callable[[Any, Any], tuple[str, str]]
"""Function of NVML and a handle of a GPU that returns a state and its consequence."""

_HARMLESS = 0x1 | 0x2  # idle; held at the application clocks, which `gpu_lines` reports in a separate line
_REASONS = SLOWDOWNS | {
    0x4: "power cap",
    0x10: "sync boost",
    0x40: "hardware thermal",  # 0x8 is set along with 0x40 and with 0x80
    0x80: "power brake",
    0x100: "display clock",
}
_UNLOADED = "the driver unloads between runs: slow starts, clocks reset"
_NO_ECC = "memory may be faster than on GPUs that have it on"
_SLICED = "a slice of a GPU: its times do not compare with a whole one's"
_POWER_SHARE = 0.99
_NAMED = 3
"""Number of other processes on the GPU that are listed by name."""


class Finding(NamedTuple):
    """Hold the state of a part of the machine, and its consequence for the user; a normal state has none."""

    subject: str
    state: str
    consequence: str = ""


def gpu_lines(nvml: Any, handle: Any, own_pid: int) -> Iterator[Finding]:
    """Describe the state of a GPU, a line per query; a query that NVML does not answer also has its line."""
    queries: Mapping[str, Query] = {
        "SM clock": _clock,
        "application clocks": _application_clocks,
        "memory clock": lambda n, h: (f"{n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM)} MHz", ""),
        "temperature": lambda n, h: (f"{n.nvmlDeviceGetTemperature(h, n.NVML_TEMPERATURE_GPU)} °C", ""),
        "power limit": _power,
        "throttled": _throttled,
        "persistence mode": lambda n, h: _switch(n.nvmlDeviceGetPersistenceMode(h) == 1, if_off=_UNLOADED),
        "ECC": lambda n, h: _switch(n.nvmlDeviceGetEccMode(h)[0] == 1, if_off=_NO_ECC),
        "MIG": lambda n, h: _switch(n.nvmlDeviceGetMigMode(h)[0] == 1, if_on=_SLICED),
        "other processes": lambda n, h: _others(n, h, own_pid),
    }
    for name, query in queries.items():
        try:
            yield Finding(name, *query(nvml, handle))
        except nvml.NVMLError as error:
            yield Finding(name, f"not known: {error}")


def throttle_names(reasons: int) -> list[str]:
    """Name the throttle reasons in NVML's bits, except idle and application clocks."""
    named = [name for bit, name in sorted(_REASONS.items()) if reasons & bit]
    rest = reasons & ~_HARMLESS & ~sum(_REASONS)
    return [*named, f"{rest:#x}"] if rest else named


def _clock(nvml: Any, handle: Any) -> tuple[str, str]:
    clock, highest = (get(handle, nvml.NVML_CLOCK_SM) for get in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo))
    loss = "NVML cannot say whether it is locked (nvidia-smi -lgc): unless it is, compare only what is measured interleaved"
    return f"{clock} of at most {highest} MHz", loss


def _application_clocks(nvml: Any, handle: Any) -> tuple[str, str]:
    now = nvml.nvmlDeviceGetApplicationsClock(handle, nvml.NVML_CLOCK_SM)
    usual = nvml.nvmlDeviceGetDefaultApplicationsClock(handle, nvml.NVML_CLOCK_SM)
    if now == usual:
        return f"SM {now} MHz, the default", ""
    return f"SM {now} MHz, default {usual}", "records of GPUs with other clocks do not compare"


def _power(nvml: Any, handle: Any) -> tuple[str, str]:
    limit = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    usual = nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000
    loss = "capped: long kernels run slower than elsewhere" if limit < usual * _POWER_SHARE else ""
    return f"{limit:.0f} W of {usual:.0f} W", loss


def _throttled(nvml: Any, handle: Any) -> tuple[str, str]:
    reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    names = throttle_names(reasons)
    kept = "are repeated" if slowed_down(reasons) else "are kept: compare only what is measured interleaved"
    return ", ".join(names) or "no", f"times are too long now: such rounds {kept}" if names else ""


def _switch(is_on: bool, if_on: str = "", if_off: str = "") -> tuple[str, str]:
    return ("on", if_on) if is_on else ("off", if_off)


def _others(nvml: Any, handle: Any, own_pid: int) -> tuple[str, str]:
    pids = [str(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle) if process.pid != own_pid]
    loss = "they disturb the times: gate and tune on a GPU of your own" if pids else ""
    return f"pid {first_of(pids, _NAMED)}" if pids else "none", loss
