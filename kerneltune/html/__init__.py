"""The report page: `data` says what is shown, `page` puts it into one HTML file with the scripts and styles of `assets/`."""
