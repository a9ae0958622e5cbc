"""Conformance tests: the suite that any implementation of the specification can be tested with.

`kvspec verify` runs the suite and writes a certificate. To run the suite as plain tests from any folder, type `python
-m pytest -p conformance.plugin --pyargs conformance.suite --backend NAME|module:ATTRIBUTE`.
"""
