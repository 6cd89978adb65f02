"""The search on a device: measure in a child, decide a duel, write the winner to the cache."""

IMPORTED = ("triton", "kerneltune.measuring.compiler", "kerneltune.tuning.isolated")
"""What the processes that compile and measure import, for `processes.start_server`."""
