"""Judge regressions with a pure verdict over two sets of records, and measure in fresh processes."""
