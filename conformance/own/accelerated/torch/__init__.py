"""Tests of the Numba backend beside the common suite: what only its own way of computing can get wrong."""
