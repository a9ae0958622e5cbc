"""Policies side by side: comparisons, sweeps and our own studies."""
