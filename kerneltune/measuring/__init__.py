"""Compile variants ahead, check them against the reference, time them in interleaved rounds, and compare their times."""
