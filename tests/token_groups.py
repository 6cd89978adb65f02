"""Groups of tokens, for the tests of operators that take them."""

import torch

WHERE = "cuda" if torch.cuda.is_available() else "cpu"


def ends_of(*ends: int) -> torch.Tensor:
    """Return the row behind each group, as operators take it."""
    return torch.tensor(ends, dtype=torch.int32, device=WHERE)
