"""Tests of a backend. They need only spec, reference, NumPy, pytest and Hypothesis."""
