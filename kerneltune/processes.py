"""Work done several times, each time in a fresh process, one after the other.

Does not know what the work is. Imports pebble.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

T = TypeVar("T")

TIMEOUT_S = 1800.0


def in_fresh_processes(count: int, work: Callable[..., T], *args: Any, timeout_s: float = TIMEOUT_S) -> Iterator[T]:
    """What `work(*args)` returns in `count` processes; both are pickled. Only one process runs at a time.

    Raises:
        ValueError: a process crashed or took longer than `timeout_s`. What `work` raises is raised here.
    """
    for number in range(1, count + 1):
        pool = ProcessPool(max_workers=1, context=multiprocessing.get_context("spawn"))
        try:
            result = pool.schedule(work, args=args, timeout=timeout_s).result()
        except FutureTimeoutError:
            raise ValueError(f"process {number} of {count} took longer than {timeout_s:g} s") from None
        except ProcessExpired as error:
            raise ValueError(f"process {number} of {count} crashed: exit code {error.exitcode}") from None
        finally:  # also when interrupted: nothing goes on timing behind our back
            pool.stop()
            pool.join()
        yield result
