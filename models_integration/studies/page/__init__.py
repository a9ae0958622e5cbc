"""Parts of a page of results: one HTML file that needs nothing beside itself."""
