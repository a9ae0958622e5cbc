"""Proof: the suite that any implementation of the specification can be run against.

`kvspec verify` runs it and certifies; as plain tests, from anywhere:
`python -m pytest -p conformance.plugin --pyargs conformance.suite --backend NAME|module:ATTRIBUTE`.
"""
