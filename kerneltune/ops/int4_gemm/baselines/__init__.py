"""Straightforward designs of `int4_gemm`."""
