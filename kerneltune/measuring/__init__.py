"""Compile variants ahead, time them in interleaved rounds, and compare their times."""
