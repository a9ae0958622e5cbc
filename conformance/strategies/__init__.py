"""Hypothesis strategies and seeded generators of test inputs, named after the specification's nouns.

tests/lab/test_reach.py shows which cases each strategy reaches.
"""
