"""Regressions: one pure verdict over two sets of records, fresh processes that measure them, and a study of its errors."""
