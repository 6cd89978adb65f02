"""Differentiate SwiGLU, the gate between the products of an expert."""

from kerneltune.ops.swiglu.bwd import SwigluConfig, swiglu_bwd

__all__ = ["SwigluConfig", "swiglu_bwd"]
