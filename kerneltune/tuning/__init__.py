"""The search on a device: measure in a child, decide the paired final, write the winner to the cache."""
