"""Cross-session injection: arithmetic that does not depend on the serving engine."""
