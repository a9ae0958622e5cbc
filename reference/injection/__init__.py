"""Cross-session injection of archived chunks: the arithmetic, which does not depend on the serving engine."""
