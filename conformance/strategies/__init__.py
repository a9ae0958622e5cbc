"""Hypothesis strategies and seeded generators of test inputs, named after the specification's nouns.

own/conformance/test_reach.py shows which cases each strategy reaches.
"""
