"""Fit rules, which choose configs for cases that nobody tuned, to measured times. Needs no GPU."""
