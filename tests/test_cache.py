"""The config cache: look-up order, a single warning for a broken file, and writes that lose nothing."""

import json
import math
import random
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from kerneltune import cache, files
from kerneltune.cache import CacheEntry
from kerneltune.spec import Case, Op, Traffic, Variant, config_of_class

pytestmark = pytest.mark.usefixtures("forgotten_configs")

OP, GPU = "rmsnorm_fwd", "nvidia_h200"
OPTIONS = (("zero_centered", False),)


def axes(rows: int, columns: int) -> tuple[tuple[str, int], ...]:
    return ("M", rows), ("N", columns)


def entry(rows: int = 8192, columns: int = 4096, warps: int = 4, **changes: Any) -> CacheEntry:
    case = Case(f"{rows}x{columns}", axes(rows, columns), "bfloat16", "fp8", OPTIONS)
    of_case = {name: changes.pop(name) for name in ("axes", "dtype", "quant", "options") if name in changes}
    values: dict[str, Any] = {
        "op": OP,
        "variant": "optimized",
        "case": replace(case, **of_case),
        "policy": "cold",
        "config": {"block": 1024, "warps": warps},
        "evidence": {"time_us": 43.5, "speedup": 1.2},
    }
    return CacheEntry(**{**values, **changes})


@dataclass(frozen=True)
class Knobs:
    block: int
    warps: int


DEFAULT = Knobs(1, 0)


@dataclass(frozen=True)
class Hit:
    """An entry that serves a case: whether it is the case's own, and its distance."""

    entry: CacheEntry
    exact: bool
    distance: float


def operator(invalid: Any = lambda *_: None, free_axes: tuple[str, ...] = ("M", "N"), **free: Any) -> Op:
    variant = Variant("optimized", lambda *_: {}, Knobs, invalid=invalid, default=lambda _case: DEFAULT)
    contract: dict[str, Any] = {"inputs": dict, "reference": dict, "compare": lambda *_: [], "traffic": lambda _: Traffic(1, 1)}
    return Op(OP, ("M", "N"), ("bfloat16",), **contract, variants=(variant,), module=__name__, free_axes=free_axes, **free)


def chooser_of(op: Op, root: Path, policy: str = "cold") -> cache.Chooser:
    return cache.Chooser.of(op, op.variant("optimized"), policy, root)


def candidates(
    root: Path,
    sizes: tuple[tuple[str, int], ...],
    dtype: str = "bfloat16",
    options: tuple[tuple[str, Any], ...] = OPTIONS,
    policy: str = "cold",
    free_axes: tuple[str, ...] = ("M", "N"),
    **free: Any,
) -> list[Hit]:
    chooser = chooser_of(operator(free_axes=free_axes, **free), root, policy)
    case = Case("", sizes, dtype, "fp8", options)
    own = chooser.own(case, GPU)
    return [
        Hit(match.entry, own is not None and own.entry is match.entry, match.distance) for match in chooser.matches(case, GPU)
    ]


def look(root: Path, rows: int, columns: int, dtype: str = "bfloat16", free: tuple[str, ...] = ("M", "N")) -> Hit | None:
    hits = candidates(root, axes(rows, columns), dtype, free_axes=free)
    return hits[0] if hits else None


def test_look_up_returns_the_exact_entry_else_the_nearest(tmp_path: Path) -> None:
    for stored in (entry(8192, warps=4), entry(16384, warps=8), entry(8192, 8192, warps=16)):
        cache.store(GPU, stored, tmp_path)
    hit = look(tmp_path, 8192, 4096)
    assert hit is not None
    assert hit.exact
    assert hit.distance == 0
    assert hit.entry.config["warps"] == 4
    hit = look(tmp_path, 65536, 4096)
    assert hit is not None
    assert not hit.exact
    assert hit.distance == 2
    assert hit.entry.config["warps"] == 8
    hit = look(tmp_path, 4096, 8192)
    assert hit is not None
    assert hit.distance == 1
    assert hit.entry.config["warps"] == 16
    assert look(tmp_path, 4096, 2048, free=("M",)) is None
    assert look(tmp_path, 0, 4096, free=("M",)) is not None


def test_candidates_at_one_distance_are_ordered_by_larger_size_then_by_config_text(tmp_path: Path) -> None:
    for stored in (entry(4096, warps=1), entry(16384, warps=2), entry(8192, 8192, warps=8), entry(8192, 2048, warps=3)):
        cache.store(GPU, stored, tmp_path)
    hits = candidates(tmp_path, axes(8192, 4096))
    assert [hit.entry.config["warps"] for hit in hits] == [2, 8, 1, 3]


def test_look_up_without_an_entry_of_the_dtype_returns_one_of_another_16_bit_dtype_only(tmp_path: Path) -> None:
    cache.store(GPU, entry(warps=4, dtype="float16"), tmp_path)
    cache.store(GPU, entry(warps=2, dtype="float32"), tmp_path)
    hit = look(tmp_path, 8192, 4096)
    assert hit is not None
    assert not hit.exact
    assert hit.distance == 0
    assert hit.entry.config["warps"] == 4
    cache.store(GPU, entry(65536, warps=8), tmp_path)
    hit = look(tmp_path, 8192, 4096)
    assert hit is not None
    assert hit.distance == 3
    assert hit.entry.config["warps"] == 8
    assert look(tmp_path, 8192, 4096, dtype="float8_e4m3fn") is None


@pytest.mark.parametrize("change", [{"quant": "none"}, {"policy": "hot"}, {"variant": "atomic"}, {"options": ()}])
def test_look_up_with_another_fixed_field_returns_none(tmp_path: Path, change: dict[str, Any]) -> None:
    cache.store(GPU, entry(**change), tmp_path)
    assert look(tmp_path, 8192, 4096) is None


def test_look_up_under_a_policy_without_an_entry_returns_the_cold_entry(tmp_path: Path) -> None:
    cache.store(GPU, entry(warps=4), tmp_path)
    cache.store(GPU, entry(16384, warps=8, policy="hot"), tmp_path)

    def served(rows: int, policy: str) -> list[tuple[int, bool]]:
        return [(hit.entry.config["warps"], hit.exact) for hit in candidates(tmp_path, axes(rows, 4096), policy=policy)]

    assert served(8192, "hot") == [(4, False), (8, False)]  # its own sizes before its own policy, and neither is exact
    assert served(16384, "hot") == [(8, True), (4, False)]
    assert served(8192, "cold") == [(4, True)]
    assert served(8192, "eager") == [(4, False)]
    cache.store(GPU, entry(warps=2, policy="hot"), tmp_path)
    assert served(8192, "hot") == [(2, True), (4, False), (8, False)]


def test_look_up_with_bands_returns_entries_of_the_same_band_only(tmp_path: Path) -> None:
    for rows in (16, 32, 100):
        cache.store(GPU, entry(rows, warps=rows), tmp_path)
    bands = {"M": (16, 32)}

    def served(rows: int, columns: int = 4096) -> list[int]:
        return [hit.entry.config["warps"] for hit in candidates(tmp_path, axes(rows, columns), bands=bands)]

    assert [served(rows) for rows in (1, 16, 17, 32, 33, 5000)] == [[16], [16], [32], [32], [100], [100]]
    assert served(31, 8192) == [32]


def test_look_up_follows_the_rule_of_near_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A maintainer who changes the rule in `nearness.py` changes which entries calls take."""
    cache.store(GPU, entry(16, warps=16), tmp_path)
    sizes, bands = axes(17, 4096), {"M": (16, 32)}
    assert candidates(tmp_path, sizes, bands=bands) == []
    monkeypatch.setattr("kerneltune.nearness.band_of", lambda ends, size: 0)
    cache.clear()
    assert [hit.entry.config["warps"] for hit in candidates(tmp_path, sizes, bands=bands)] == [16]


GROUPS = (("group", 128), ("zeros", False))


def near(
    root: Path, wanted: tuple[tuple[str, Any], ...], free: tuple[str, ...] = ("group", "zeros")
) -> list[tuple[int, bool, float]]:
    hits = candidates(root, axes(8192, 4096), options=wanted, free_axes=("M",), free_options=free)
    return [(hit.entry.config["warps"], hit.exact, hit.distance) for hit in hits]


def test_candidates_are_exact_then_of_other_free_options_then_of_other_sizes(tmp_path: Path) -> None:
    """An entry that differs in both is no candidate: that is left to the default."""
    stored = [(4096, 128, False), (8192, 32, False), (8192, 64, False), (8192, 64, True), (4096, 64, False)]
    for warps, (rows, group, zeros) in enumerate(stored):
        cache.store(GPU, entry(rows, warps=warps, options=(("group", group), ("zeros", zeros))), tmp_path)
    assert near(tmp_path, GROUPS) == [(2, False, 1), (3, False, 2), (1, False, 2), (0, False, 1)]
    assert near(tmp_path, (("group", 32), ("zeros", False)))[0] == (1, True, 0)
    assert near(tmp_path, GROUPS, free=("group",)) == [(2, False, 1), (1, False, 2), (0, False, 1)]
    assert near(tmp_path, GROUPS, free=()) == [(0, False, 1)]
    cache.store(GPU, entry(warps=5, options=GROUPS), tmp_path)
    assert near(tmp_path, GROUPS)[0] == (5, True, 0)
    assert near(tmp_path, (("group", 128),)) == []


def test_candidates_of_another_option_value_have_distance_1_and_larger_values_first(tmp_path: Path) -> None:
    for group in (32, 64, 128):
        cache.store(GPU, entry(warps=group, options=(("group", group), ("zeros", False))), tmp_path)
    assert near(tmp_path, (("group", 0), ("zeros", False))) == [(128, False, 1), (64, False, 1), (32, False, 1)]
    assert near(tmp_path, (("group", 64), ("zeros", True)))[0] == (64, False, 1)


def test_candidates_of_the_same_dtype_precede_those_of_another_dtype(tmp_path: Path) -> None:
    cache.store(GPU, entry(warps=1, dtype="float16", options=GROUPS), tmp_path)
    cache.store(GPU, entry(warps=2, options=(("group", 128), ("zeros", True))), tmp_path)
    assert near(tmp_path, GROUPS) == [(2, False, 1), (1, False, 0)]


def test_look_up_of_0_rows_and_of_1_row_are_different_sizes(tmp_path: Path) -> None:
    cache.store(GPU, entry(0), tmp_path)
    hits = look(tmp_path, 1, 4096), look(tmp_path, 0, 4096)
    assert [hit and (hit.exact, hit.distance) for hit in hits] == [(False, 0), (True, 0)]


def chooser(root: Path, most_warps: int = 8, **free: Any) -> cache.Chooser:
    def invalid(_case: Case, knobs: Knobs) -> str | None:
        return None if knobs.warps <= most_warps and 4096 % knobs.block == 0 else "no such tile"

    return chooser_of(operator(invalid, max_distance=math.inf, **free), root)


@pytest.mark.filterwarnings("ignore::kerneltune.misses.CacheMissWarning")
def test_chooser_returns_the_first_valid_config_until_the_next_store(tmp_path: Path) -> None:
    asked = (axes(8192, 4096), "bfloat16", "fp8", OPTIONS, GPU)
    choose = chooser(tmp_path)
    assert choose(*asked) is DEFAULT
    cache.store(GPU, entry(warps=8), tmp_path)
    cache.store(GPU, entry(16384, warps=2), tmp_path)
    assert choose(*asked) == Knobs(1024, 8)
    assert chooser(tmp_path, most_warps=4)(*asked) == Knobs(1024, 2)
    assert choose(axes(7, 8), *asked[1:]) == Knobs(1024, 8)
    assert choose(*asked[:2], "none", *asked[3:]) is DEFAULT
    (tmp_path / GPU / f"{OP}.json").unlink()
    assert choose(*asked) == Knobs(1024, 8)
    cache.clear()
    assert choose(*asked) is DEFAULT


@pytest.mark.filterwarnings("ignore::kerneltune.misses.CacheMissWarning")
def test_chooser_skips_invalid_configs_of_other_free_options(tmp_path: Path) -> None:
    choose = chooser(tmp_path, free_options=("zero_centered",))
    asked = (axes(8192, 4096), "bfloat16", "fp8", OPTIONS, GPU)
    cache.store(GPU, entry(warps=16, options=(("zero_centered", True),)), tmp_path)
    assert choose(*asked) is DEFAULT
    cache.store(GPU, entry(128, warps=4), tmp_path)
    assert choose(*asked) == Knobs(1024, 4)
    cache.store(GPU, entry(warps=2, options=(("zero_centered", True),)), tmp_path)
    assert choose(*asked) == Knobs(1024, 2)
    assert chooser(tmp_path)(*asked) == Knobs(1024, 4)
    cache.store(GPU, entry(warps=1), tmp_path)
    assert choose(*asked) == Knobs(1024, 1)


@pytest.mark.filterwarnings("ignore::kerneltune.misses.CacheMissWarning")
@pytest.mark.parametrize(
    "knobs",
    [{"block": 0, "warps": 4}, {"block": 1024}, {"block": 1024, "warps": 4, "early": True}, {"block": 1024, "warps": "4"}],
)
def test_chooser_skips_entries_with_unknown_knobs(tmp_path: Path, knobs: dict[str, Any]) -> None:
    cache.store(GPU, entry(config=knobs), tmp_path)
    assert chooser(tmp_path)(axes(8192, 4096), "bfloat16", "fp8", OPTIONS, GPU) is DEFAULT
    cache.store(GPU, entry(16384), tmp_path)
    assert chooser(tmp_path)(axes(8192, 4096), "bfloat16", "fp8", OPTIONS, GPU) == Knobs(1024, 4)


@pytest.mark.parametrize("error", [KeyError("M"), TypeError("no number"), IndexError("2")])
def test_valid_config_raises_an_error_of_the_code_of_invalid(error: Exception) -> None:
    def mistaken(_case: Case, _config: Any) -> None:
        raise error

    case = Case("c", axes(8192, 4096), "bfloat16", "fp8", OPTIONS)
    knobs = {"block": 1024, "warps": 4}
    with pytest.raises(type(error)):
        operator(mistaken).variant("optimized").valid_config(case, knobs)


def test_valid_config_of_knobs_that_invalid_cannot_compute_with_is_none() -> None:
    def divides(_case: Case, config: Any) -> None:
        assert 4096 % config.block == 0

    case = Case("c", axes(8192, 4096), "bfloat16", "fp8", OPTIONS)
    valid_config = operator(divides).variant("optimized").valid_config
    assert valid_config(case, {"block": 1024, "warps": 4}) == Knobs(1024, 4)
    assert valid_config(case, {"block": 0, "warps": 4}) is None
    assert valid_config(case, {"block": "wide", "warps": 4}) is None


@dataclass(frozen=True)
class MoreKnobs:
    block: int
    warps: int
    blocks: int = 1


def test_words_that_look_like_no_number_stay_in_texts(tmp_path: Path) -> None:
    named = entry(options=(("mode", "x, NaN, y: -Infinity}"),))
    path = cache.store(GPU, named, tmp_path)
    cache.store(GPU, entry(16384), tmp_path)
    path.write_text(path.read_text().replace("43.5", "NaN", 1))
    found = {each.case["M"]: each for each in cache.load(OP, GPU, tmp_path)}
    assert sorted(found) == [8192, 16384]
    assert found[8192].case.options == named.case.options
    assert None in (each.evidence["time_us"] for each in found.values())


def test_cases_with_options_of_other_types_are_different(tmp_path: Path) -> None:
    cases = [entry(options=(("on", value),)) for value in (True, 1)]
    assert len({each.case for each in cases}) == 2
    for each in cases:
        cache.store(GPU, each, tmp_path)
    assert len(cache.load(OP, GPU, tmp_path)) == 2


@dataclass(frozen=True)
class MadeKnobs:
    block: int
    name: str = field(default_factory=str)


def test_config_from_an_older_entry_calls_the_factory_of_a_newer_knob() -> None:
    assert config_of_class(MadeKnobs, {"block": 8}) == MadeKnobs(8, "")


def test_config_from_an_older_entry_gives_a_newer_knob_its_default() -> None:
    assert config_of_class(MoreKnobs, {"block": 1024, "warps": 4}) == MoreKnobs(1024, 4, 1)
    assert config_of_class(MoreKnobs, {"block": 1024, "warps": 4, "blocks": 2}) == MoreKnobs(1024, 4, 2)
    for knobs in (
        {"block": 1024, "blocks": 2},
        {"block": 1024, "warps": 4, "early": 1},
        {"block": 1024, "warps": 4, "blocks": None},
    ):
        with pytest.raises(ValueError, match=r"expected the knobs|blocks: None: expected int"):
            config_of_class(MoreKnobs, knobs)


def test_default_root_is_that_of_the_environment_else_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELTUNE_CONFIGS", str(tmp_path))
    assert cache.default_root() == tmp_path
    monkeypatch.delenv("KERNELTUNE_CONFIGS")
    package = tmp_path / "kerneltune"
    package.mkdir()
    monkeypatch.setattr(files, "__file__", str(package / "files.py"))
    assert cache.default_root() == Path("configs")
    (tmp_path / "pyproject.toml").write_text("")
    assert cache.default_root() == Path("configs")
    monkeypatch.chdir(package)
    assert cache.default_root() == tmp_path / "configs"


def stored_file(root: Path) -> Path:
    cache.store(GPU, entry(), root)
    return cache.store(GPU, entry(16384), root)


def with_entry(path: Path, index: int, **changes: Any) -> None:
    data = json.loads(path.read_text())
    data["entries"][index].update(changes)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": {"M": "8192"}}, "axes: {'M': '8192'}: expected int"),
        ({"axes": [1]}, "axes: [1]: expected object"),
        ({"options": {"pad": None}}, "options: {'pad': None}: expected bool | int | float | str"),
        ({"dtype": 5}, "dtype: 5: expected str"),
        ({"config": "block=1"}, "config: 'block=1': expected object"),
        ({"colour": "red"}, "colour: 'red': expected no field of this name"),
        ({"axes": {"M": 8192, "N": 4096}}, "case: '16384x4096': expected one entry of each identity"),
    ],
)
def test_load_of_a_broken_entry_skips_it_with_one_warning(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = stored_file(tmp_path)
    with_entry(path, 1, **changes)
    cache.clear()
    with pytest.warns(UserWarning) as warned:
        assert cache.load(OP, GPU, tmp_path) == [entry()]
    assert [str(w.message) for w in warned] == [f"{path}: entries[1]: {message}; not used"]
    with pytest.raises(ValueError) as error:
        cache.load_strict(path)
    assert str(error.value) == f"{path}: entries[1]: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 1,\n oops', ": JSON: object keys must be strings at line 2"),
        ("[]", ": JSON: []: expected object"),
        ('{"schema": 2, "op": "", "device": "", "entries": []}', ": schema: 2: expected 1"),
        ('{"schema": 1, "op": "gemm", "device": "", "entries": []}', ": op: 'gemm': expected 'rmsnorm_fwd'"),
        ('{"schema": 1, "op": "rmsnorm_fwd", "device": "h100", "entries": []}', ": device: 'h100': expected 'nvidia_h200'"),
        ('{"schema": 1, "op": "rmsnorm_fwd", "device": "nvidia_h200"}', ": entries: missing"),
    ],
)
def test_look_up_in_a_broken_file_warns_once_and_store_refuses_it(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / GPU / f"{OP}.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.warns(UserWarning) as warned:
        assert look(tmp_path, 1, 2) is None
        assert look(tmp_path, 3, 4) is None
    assert [str(w.message) for w in warned] == [f"{path}{message}; not used"]
    with pytest.raises(ValueError) as error:
        cache.store(GPU, entry(), tmp_path)
    assert str(error.value) == f"{path}{message}"
    assert path.read_text() == text


def test_load_of_two_broken_entries_warns_once(tmp_path: Path) -> None:
    path = stored_file(tmp_path)
    with_entry(path, 0, dtype="")
    with_entry(path, 1, quant="")
    with pytest.warns(UserWarning) as warned:
        assert cache.load(OP, GPU, tmp_path) == []
    assert [str(w.message) for w in warned] == [
        f"{path}: entries[0]: dtype: '': expected str of length >= 1 (and 1 more); not used"
    ]


def test_load_and_load_strict_without_a_file_are_empty(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.load(OP, GPU, tmp_path) == cache.load_strict(tmp_path / "x.json") == []


def test_look_up_in_a_folder_that_cannot_be_read_warns_and_returns_the_default(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 300)  # fails for every user; the permissions of a folder do not stop root
    with pytest.warns(UserWarning, match=rf"^cannot read {folder}/{GPU}/{OP}.json: .*; not used$"):
        assert chooser_of(operator(), folder).find(Case("", axes(1, 2), "bfloat16", "fp8", OPTIONS), GPU).source.name == "default"


def test_look_up_beside_a_folder_that_cannot_be_read_uses_packaged_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(GPU, entry(), tmp_path / "packaged")
    monkeypatch.setattr(cache, "read_roots", lambda _root=None: [tmp_path / ("x" * 300), tmp_path / "packaged"])
    assert cache.load(OP, GPU) == [entry()]


def test_candidates_are_sorted_by_distance(tmp_path: Path) -> None:
    rng = random.Random(0)
    for warps in range(30):
        cache.store(GPU, entry(rng.randrange(1, 10000), rng.randrange(1, 10000), warps), tmp_path)
    for _ in range(50):
        wanted = axes(rng.randrange(1, 10000), rng.randrange(1, 10000))
        hits = candidates(tmp_path, wanted)
        assert len(hits) == 30
        assert [hit.distance for hit in hits] == sorted(hit.distance for hit in hits)
