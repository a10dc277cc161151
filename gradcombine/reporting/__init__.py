"""Reports in sections of text, tables and charts, shown on a terminal or as an HTML page."""
