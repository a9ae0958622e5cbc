"""Comparison with kvpress: `python -m lab.measure.peers`, in a separate environment.

Both libraries get the same keys, values and queries, and their kept sets are compared. A named reading explains each
difference. With the readings of the press, the sets are equal on every input, or the command fails.
"""
