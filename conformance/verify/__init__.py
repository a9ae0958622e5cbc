"""`kvspec verify`: a suite run on somebody's engine, policy or cache, and its verdict row by row, as a certificate.

`python -m conformance.verify --help`. What stands in a certificate: spec/certificate.md.
"""
