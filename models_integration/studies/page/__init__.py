"""Parts of a page of results, which is a single HTML file without external files."""
