"""Device code of `int4_gemm`."""
