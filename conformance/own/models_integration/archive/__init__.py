"""Cross-session injection: its specification's items, and the archive."""
