"""Proof: the suite that any implementation of the specification can be run against.

From anywhere: `python -m pytest -p conformance.plugin --pyargs conformance.suite --backend NAME|module:ATTRIBUTE`.
"""
