"""Oracles for full sizes of what no backend's stage computes; NumPy, apart from the reference."""
