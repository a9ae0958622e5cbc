"""Tests of the Numba backend beside the common suite."""
