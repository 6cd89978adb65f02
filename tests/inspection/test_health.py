"""Test doctor's lines about a GPU, with a pretended NVML."""

from types import SimpleNamespace
from typing import Any

import pytest

from kerneltune.inspection.health import gpu_lines, throttle_names


class FakeNvml:
    """Answers with `answers` by name of the query; an exception is raised."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, **changes: Any) -> None:
        self.answers: dict[str, Any] = {
            "ClockInfo": 1980,
            "MaxClockInfo": 1980,
            "ApplicationsClock": 1980,
            "DefaultApplicationsClock": 1980,
            "Temperature": 41,
            "EnforcedPowerLimit": 700_000,
            "PowerManagementDefaultLimit": 700_000,
            "CurrentClocksEventReasons": 0x1,
            "PersistenceMode": 1,
            "EccMode": [1, 1],
            "MigMode": [0, 0],
            "ComputeRunningProcesses": [SimpleNamespace(pid=7)],
            **changes,
        }

    def __getattr__(self, query: str) -> Any:
        def ask(_handle: object, *_: object) -> Any:
            answer = self.answers[query.removeprefix("nvmlDeviceGet")]
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask


def lines(**changes: Any) -> dict[str, tuple[str, str]]:
    return {what: (state, means) for what, state, means in gpu_lines(FakeNvml(**changes), object(), own_pid=7)}


def test_health_of_a_gpu_in_order_explains_only_its_clock() -> None:
    state = lines()
    assert [what for what, (_, means) in state.items() if means] == ["SM clock"]
    assert "NVML cannot say whether it is locked" in state["SM clock"][1]
    assert state["other processes"] == ("none", "")
    assert state["power limit"] == ("700 W of 700 W", "")


@pytest.mark.parametrize(
    ("what", "changes", "value", "means"),
    [
        ("application clocks", {"ApplicationsClock": 1500}, "SM 1500 MHz, default 1980", "do not compare"),
        ("power limit", {"EnforcedPowerLimit": 500_000}, "500 W of 700 W", "capped"),
        ("throttled", {"CurrentClocksEventReasons": 0x4D}, "power cap, hardware slowdown, hardware thermal", "are repeated"),
        ("throttled", {"CurrentClocksEventReasons": 0x20}, "software thermal", "are repeated"),
        ("throttled", {"CurrentClocksEventReasons": 0x5}, "power cap", "are kept"),
        ("throttled", {"CurrentClocksEventReasons": 0x110}, "sync boost, display clock", "are kept"),
        ("persistence mode", {"PersistenceMode": 0}, "off", "slow starts"),
        ("ECC", {"EccMode": [0, 1]}, "off", "faster"),
        ("MIG", {"MigMode": [1, 1]}, "on", "a slice of a GPU"),
        ("other processes", {"ComputeRunningProcesses": [SimpleNamespace(pid=p) for p in (7, 8, 9)]}, "pid 8, 9", "disturb"),
        (
            "other processes",
            {"ComputeRunningProcesses": [SimpleNamespace(pid=p) for p in range(1, 7)]},
            "pid 1, 2, 3 and 3 more",
            "disturb",
        ),
    ],
)
def test_health_explains_each_value_out_of_order(what: str, changes: dict[str, Any], value: str, means: str) -> None:
    state = lines(**changes)
    assert state[what][0] == value
    assert means in state[what][1]
    assert [name for name, (_, text) in state.items() if text] == sorted({"SM clock", what}, key=list(state).index)


def test_health_prints_not_known_for_values_that_nvml_refuses() -> None:
    state = lines(MigMode=FakeNvml.NVMLError("Not Supported"), ApplicationsClock=FakeNvml.NVMLError("Not Supported"))
    assert state["MIG"] == state["application clocks"] == ("not known: Not Supported", "")
    assert list(state) == list(lines())


def test_throttle_names_of_a_bit_mask_are_its_reasons() -> None:
    assert throttle_names(0x3) == []  # idle, and held at the application clocks
    assert throttle_names(0x8 | 0x20 | 0x80) == ["hardware slowdown", "software thermal", "power brake"]
    assert throttle_names(0x1000) == ["0x1000"]
