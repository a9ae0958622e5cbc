"""Oracles for full sizes: float64 NumPy from the text of spec/*.md, separate from the reference.

`tests/conformance/test_scale_oracles.py` compares each of them with the brute-force oracle on small inputs.
"""
