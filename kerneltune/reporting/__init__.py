"""Pure functions of records: tables, pictures and the offline HTML page."""
