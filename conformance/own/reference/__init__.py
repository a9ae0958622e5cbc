"""Tests of the reference's policies: oracles, refusals, defaults."""
