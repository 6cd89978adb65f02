"""Published designs of `multi_cast_transpose`, written anew."""
