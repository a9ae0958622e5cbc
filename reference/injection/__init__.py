"""Arithmetic of cross-session injection of archived chunks, independent of the serving engine."""
