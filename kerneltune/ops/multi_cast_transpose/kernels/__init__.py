"""Device code of `multi_cast_transpose`, with its launches."""
