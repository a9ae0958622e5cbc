"""Engines of other languages: the protocol, processes that fail, and mistakes that the suite names through them."""
