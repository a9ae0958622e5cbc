"""Comparisons of policies, sweeps of constants, and evaluations of the papers."""
