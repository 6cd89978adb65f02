"""Make tables, pictures and the offline HTML page of records, by pure functions."""
