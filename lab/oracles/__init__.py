"""Oracles in plain Python for injection and statistics."""
