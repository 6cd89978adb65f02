"""Published designs of fp8 casts, written anew."""
