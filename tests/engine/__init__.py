"""Engines in other languages: the protocol, failing processes, and the errors that the suite reports for them."""
