"""Code that operators share: device code (`tl_…`), launches, memory between programs, checks of tensors, groups of tokens."""
