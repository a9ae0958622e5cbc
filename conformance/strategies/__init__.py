"""Hypothesis strategies and seeded generators of test inputs, named after the specification's nouns."""
