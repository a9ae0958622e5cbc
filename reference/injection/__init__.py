"""Cross-session injection: the arithmetic that is the same for every engine."""
