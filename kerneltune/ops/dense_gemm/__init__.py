"""Products of few tokens with weights of 16 or 8 bits: what weights of four bits are compared with, from one run."""

from kerneltune.ops.dense_gemm.configs import DenseConfig, TileConfig
from kerneltune.ops.dense_gemm.fp8 import fp8_gemm
from kerneltune.ops.dense_gemm.fp16 import fp16_gemm

__all__ = ["DenseConfig", "TileConfig", "fp8_gemm", "fp16_gemm"]
