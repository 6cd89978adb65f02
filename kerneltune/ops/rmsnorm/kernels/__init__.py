"""Device code of RMSNorm, each kernel with its launch."""
