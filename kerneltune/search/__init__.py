"""The search for a config in a finite space, what it leaves behind, and its replay: no GPU, no torch."""
