"""Tests of the reference policies: oracles, errors, defaults."""
