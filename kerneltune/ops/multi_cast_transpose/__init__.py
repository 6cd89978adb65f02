"""Casts of lists of weights to fp8 under delayed scaling, with their transposes."""

from kerneltune.ops.multi_cast_transpose.cast_transpose import MultiCast, MultiCastConfig, multi_cast_transpose

__all__ = ["MultiCast", "MultiCastConfig", "multi_cast_transpose"]
