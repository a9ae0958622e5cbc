"""kvpress beside this project: `python -m conformance.measure.peers`, in an environment of its own.

Both get the same keys, values and queries; their kept sets are compared. Where they differ, a named reading explains
it: with the press's readings applied, the sets are equal on every input, or the command fails.
"""
