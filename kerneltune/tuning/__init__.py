"""The search on a device: measure in a child, decide the paired final, write the winner to the cache."""

IMPORTED = ("triton",)
"""What the processes that compile and measure import beside torch, for `processes.start_server`; nothing of this package, another
copy of which may lie where the command is run."""
