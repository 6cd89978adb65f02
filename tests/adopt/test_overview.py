"""Sizes that keys omit: sizes alone, and no other integers."""

from pathlib import Path

import pytest
from adopted import captured, of_kernel
from msgspec import structs

from kerneltune.adopt import overview
from kerneltune.adopt.arguments import Argument
from kerneltune.adopt.folder import LaunchClass, ProcessNotes
from kerneltune.adopt.kernels import KernelName
from kerneltune.adopt.overview import Capture, findings, unkeyed_dimensions, varying_sizes


@pytest.fixture
def launches(tmp_path: Path) -> list[LaunchClass]:
    """Return launches of 4 and 8 rows, whose key has the columns only, with a seed and a count of programs."""
    others = (Argument("seed", "value", 4), Argument("NUM_SMS", "value", 132))
    sums = of_kernel(captured(tmp_path, (4, 96), (8, 96)), "row_sum")
    return sorted((structs.replace(one, arguments=(*one.arguments, *others)) for one in sums), key=lambda one: one.sizes["M"])


def test_unkeyed_dimensions_are_dimensions_of_tensors(launches: list[LaunchClass]) -> None:
    assert unkeyed_dimensions(launches[:1]) == ["M"]


def test_varying_sizes_lists_sizes_but_no_seeds(launches: list[LaunchClass]) -> None:
    first, second = launches
    changed = structs.replace(second, arguments=(*second.arguments[:-2], Argument("seed", "value", 5)))
    assert varying_sizes([first, changed]) == ["M", "NUM_SMS", "x_ptr.0", "y_ptr.0"]


def test_varying_sizes_of_a_kernel_with_one_config_is_empty(launches: list[LaunchClass]) -> None:
    alone = [structs.replace(one, list_size=1) for one in launches]
    assert (varying_sizes(alone), unkeyed_dimensions(alone)) == ([], [])


def test_lint_names_omitted_sizes_beside_those_that_differ(tmp_path: Path, launches: list[LaunchClass]) -> None:
    others = (Argument("K", "value", 4), Argument("sxm", "value", 96))  # the key has N=96, from which the stride follows
    more = [structs.replace(one, arguments=(*one.arguments, *others)) for one in launches]
    lines = findings(Capture(tmp_path, more, ProcessNotes({})))
    assert [text for text in lines if "key omits" in text] == [
        "two_kernels.row_sum: key omits sizes that differ between captured launches: M, x_ptr.0, y_ptr.0",
        "two_kernels.row_sum: key omits sizes: K",
    ]


def test_lint_of_a_plain_kernel_reports_no_config_that_never_wins(
    tmp_path: Path, launches: list[LaunchClass], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {one.digest: {one.candidates[1].config} for one in launches}
    monkeypatch.setattr(overview, "_chosen_configs", lambda _root: chosen)
    plain = [structs.replace(one, is_plain=True) for one in launches]
    assert any("never win" in text for text in findings(Capture(tmp_path, launches, ProcessNotes({}))))
    assert not any("never win" in text for text in findings(Capture(tmp_path, plain, ProcessNotes({}))))


def test_lint_of_a_plain_kernel_reports_no_lists_of_configs(tmp_path: Path, launches: list[LaunchClass]) -> None:
    other = [structs.replace(one, configs_digest="0123456789ab") for one in launches]
    plain = [structs.replace(one, is_plain=True) for one in (*launches, *other)]
    assert any("2 lists of configs" in text for text in findings(Capture(tmp_path, [*launches, *other], ProcessNotes({}))))
    assert not any("lists of configs" in text for text in findings(Capture(tmp_path, plain, ProcessNotes({}))))


def test_lint_of_two_autotuners_of_a_kernel_reports_no_lists_of_one_key(tmp_path: Path, launches: list[LaunchClass]) -> None:
    home = KernelName("two_kernels", "small_sum")
    other = [structs.replace(one, configs_digest="0123456789ab", home=home) for one in launches]
    assert not any("lists of configs" in text for text in findings(Capture(tmp_path, [*launches, *other], ProcessNotes({}))))


def test_lint_names_key_values_of_a_heuristic_below_the_autotuner(tmp_path: Path, launches: list[LaunchClass]) -> None:
    keyed = [structs.replace(one, key_names=(*one.key_names, "EVEN")) for one in launches]
    message = "two_kernels.row_sum: key names what no launch gives, which triton.autotune leaves out: EVEN"
    assert message in findings(Capture(tmp_path, keyed, ProcessNotes({})))
    assert not any("EVEN" in text for text in findings(Capture(tmp_path, launches, ProcessNotes({}))))
