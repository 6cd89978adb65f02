"""Operators that keep memory between programs, from many threads on a GPU: bit for bit what one thread gets."""

import pytest
from thread_jobs import CALLS, wrong_calls

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("own_streams", [False, True], ids=["one stream", "own streams"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_four_threads_give_the_bits_of_one_thread(name: str, own_streams: bool) -> None:
    assert wrong_calls([CALLS[name](seed) for seed in range(4)], 200, own_streams=own_streams) == 0


def test_calls_of_different_operators_in_threads_give_the_bits_of_one_thread() -> None:
    names = ["tensorwise pow2", "tensorwise", "group colwise", "grouped step", "rmsnorm bwd split", "int4 split"]
    assert wrong_calls([CALLS[name](seed) for seed, name in enumerate(names)], 300) == 0
