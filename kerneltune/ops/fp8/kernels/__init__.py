"""Device code of the fp8 casts, each kernel with its launch."""
