"""Call functions in place of torch's."""

from collections.abc import Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class _Dispatched:
    """Hold the method of `Calls` that torch calls.

    torch wraps this method of a mode's own class, so that its first call in a process imports torch's compiler. That takes 1 s,
    for 897 modules (`tests/checking/test_quotients.py`; torch 2.13, 2026-11-30).
    """

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a call within the mode."""
        return func(*args, **kwargs)


class Calls(_Dispatched, TorchDispatchMode):
    """See every call of a function of torch within `with`; a subclass has a `call` of its own."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work within the mode."""
        return True
