"""Cross-session injection: the items of its specification, and the archive."""
