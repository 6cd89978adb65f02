"""The order of stored configs by their distance to a case."""

import pytest

from kerneltune.nearness import CaseValues, ranked

WANTED: CaseValues = ({"M": 1024, "N": 4096}, "bfloat16", "int4", {"group": 64, "zeros": False})


def place(M: int = 1024, N: int = 4096, dtype: str = "bfloat16", **options: object) -> CaseValues:
    return {"M": M, "N": N}, dtype, "int4", {"group": 64, "zeros": False} | options


def order(stored: dict[str, CaseValues], bands: dict[str, tuple[int, ...]] | None = None, max_distance: float = 4.0) -> list[str]:
    """Rank entries by name, where M and both options are free."""
    names = ranked(WANTED, [(at, name) for name, at in stored.items()], {"M"}, {"group", "zeros"}, bands or {}, max_distance)
    return [name for _, name in names]


def test_ranked_puts_entries_of_the_dtype_first_then_those_of_the_sizes_then_the_nearest() -> None:
    stored = {
        "far": place(M=8192), "other type": place(dtype="float16"), "near": place(M=2048), "other option": place(group=128),
        "switched": place(zeros=True), "itself": place(),
    }  # fmt: skip
    assert order(stored) == ["itself", "other option", "switched", "near", "far", "other type"]


def test_ranked_keeps_the_order_of_entries_at_one_distance() -> None:
    assert order({"above": place(M=2048), "below": place(M=512)}) == ["above", "below"]
    assert order({"below": place(M=512), "above": place(M=2048)}) == ["below", "above"]


@pytest.mark.parametrize(
    "refused",
    [
        pytest.param(place(N=2048), id="fixed axis"),
        pytest.param(place(dtype="float32"), id="32 bits"),
        pytest.param(place(M=2048, group=128), id="size and option"),
        pytest.param(place(M=1024 * 17), id="beyond the distance"),
        pytest.param(place(M=2049), id="another band"),
        pytest.param(place(bias=True), id="unknown option"),
        pytest.param(({"M": 1024}, *place()[1:]), id="missing axis"),
        pytest.param((*place()[:2], "none", place()[3]), id="another mode"),
    ],
)
def test_ranked_leaves_out_entries_that_cannot_serve(refused: CaseValues) -> None:
    assert order({"refused": refused, "kept": place(M=2048)}, bands={"M": (2048,)}) == ["kept"]


def test_ranked_gives_a_size_of_zero_a_finite_distance() -> None:
    assert order({"none": place(M=0)}, max_distance=10.0) == ["none"]
    assert order({"none": place(M=0)}, max_distance=9.9) == []
