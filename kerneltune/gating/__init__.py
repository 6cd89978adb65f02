"""Judge regressions with a pure verdict over two sets of records, measure in fresh processes, and study the verdict's errors."""
