"""`kvspec verify`: the suite run on somebody's engine, and its verdict item by item, as a certificate.

`python -m conformance.verify --help`. What stands in a certificate: spec/certificate.md.
"""
