"""Correct Triton's interpreter, let it report undefined behaviour, and collect facts of the launches that it runs."""
