"""Measured behaviour of other libraries: defects to report (`upstream`), and certificates."""
