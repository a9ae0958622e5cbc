"""Proof: the suite that any implementation of the specification can be run against.

`python -m pytest -p conformance.plugin --pyargs conformance --backend NAME|module:ATTRIBUTE` runs it from anywhere.
"""
