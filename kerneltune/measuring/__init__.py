"""One variant, or several side by side: compiled ahead, checked against the reference, timed in turns, compared."""
