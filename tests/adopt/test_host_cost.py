"""The host's time of a served launch depends little on whether its integers were seen before, and not on the table's size."""

import importlib
import itertools
import sys
from pathlib import Path

import torch
from adopted import ROOT

from kerneltune.adopt import startup
from kerneltune.adopt.table import Group, TableKernel


def test_group_of_a_launch_is_found_as_fast_among_many() -> None:
    """A launch of a kernel without an autotuner looks for its group with each new integer."""
    sys.path.append(str(ROOT / "examples" / "adopted_packages"))
    cost_us = importlib.import_module("host_cost").cost_us
    costs = []
    for count in (2, 512):
        groups = tuple(Group([*range(20), number], ["float32"], (), ()) for number in range(count))
        code = {"source_digest": "", "bytecode_digest": "", "configs_digest": "", "key_names": ()}
        kernel = TableKernel("module", "kernel", "", groups, (), **code)
        assert kernel.group([*range(20), 1], ["float32"]) is groups[1]
        assert kernel.group([*range(20), True], ["float32"]) is None
        costs.append(cost_us(lambda kernel=kernel: kernel.group([*range(20), 1000], ["float32"]), 25, 40))
    assert costs[1] < 5 * costs[0]


def test_served_launch_with_a_new_number_costs_at_most_10_repeated_launches(tmp_path: Path) -> None:
    sys.path.append(str(ROOT / "examples" / "adopted_packages"))
    host_cost = importlib.import_module("host_cost")
    kernel = host_cost.made_kernel(tmp_path, 3, 4, configs=48)
    args, new = [*(torch.empty(4, 8) for _ in range(3)), 1, 2, 3], itertools.count(1000)
    startup.capture(tmp_path)
    kernel[lambda meta: (1,)](*args, 4)
    startup.uninstall()
    by_rows = {}
    for rows in (1, 16):
        host_cost.write_rows(tmp_path, rows)
        startup.install(tmp_path, miss="error")
        launches = (lambda: kernel[lambda meta: (1,)](*args, 4), lambda: kernel[lambda meta: (1,)](*args, next(new)))
        by_rows[rows] = [host_cost.cost_us(launch, 25, 40) for launch in launches]
        assert startup.server().misses == 0
        startup.uninstall()
    assert by_rows[1][1] < 2 * by_rows[1][0]  # the number has no part in the choice
    assert by_rows[16][1] < 10 * by_rows[16][0]  # the number decides between rows; encoding 48 configs took 100 times as long
