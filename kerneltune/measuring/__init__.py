"""Compile variants ahead, check them against the reference, time them in turns, and compare their times."""
