"""`kvspec verify`: run a test suite on an engine, policy, cache or server, and write the verdict as a certificate.

See `python -m conformance.verify --help` for the options, and spec/certificate.md for the content of a certificate.
"""
