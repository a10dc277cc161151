"""Reports as sections of text, tables and charts: on a terminal, in an HTML page."""
