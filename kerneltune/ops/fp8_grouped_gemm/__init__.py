"""Grouped products of fp8 matrices, which a mixture of experts trains with."""

from kerneltune.ops.fp8_grouped_gemm.gemm import CUTLASS, GemmConfig, fp8_grouped_gemm

__all__ = ["CUTLASS", "GemmConfig", "fp8_grouped_gemm"]
