"""The search on a device: measure in a child, decide a duel, write the winner to the cache."""
