"""Divide by a number as torch does on a GPU, so that a check without a GPU compares with the values of one."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from kerneltune.checking.dispatch import Calls
from kerneltune.errors import is_own


class AsOnGpu(Calls):
    """Multiply tensors by the rounded reciprocal of a number that the code divides by, as torch does on a GPU alone.

    A product with 1 / 15 and a quotient by 15 differ in the last bit. Quotients by a tensor are exact on a GPU as well
    (aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu). For code that runs without a GPU.

    Attributes:
        first: `NUMBER on a GPU, FILE:LINE` of the first such division in the files of the folder, empty for none.
    """

    def __init__(self, folder: str = "") -> None:
        super().__init__()
        self._folder, self.first = folder, ""

    def call(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call a function; divide by numbers, but powers of two, as on a GPU."""
        if func not in _DIVISIONS or kwargs or not isinstance(args[1], int | float) or abs(np.frexp(args[1])[0]) == 0.5:
            return func(*args, **kwargs)
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and not is_own(self._folder, frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not None and not self.first:
            self.first = f"{args[1]:g} on a GPU, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        of = np.float64 if args[0].dtype in (torch.float64, torch.complex128) else np.float32
        with np.errstate(all="ignore"):
            inverse = float(of(1) / of(args[1]))
        is_new = func is torch.ops.aten.div.Tensor
        return torch.mul(args[0], inverse) if is_new else args[0].mul_(inverse)


_DIVISIONS = (torch.ops.aten.div.Tensor, torch.ops.aten.div_.Tensor)
