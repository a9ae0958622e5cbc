"""Oracles for full sizes: float64 NumPy from the text of spec/*.md, apart from the reference.

`conformance/own/conformance/test_scale_oracles.py` holds each of them against the brute-force oracle on small inputs.
"""
