"""Device code of grouped fp8 products."""
