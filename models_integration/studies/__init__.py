"""Policies side by side: comparisons and sweeps."""
