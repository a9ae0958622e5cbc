"""Test vectors in JSON, for implementations in any language: `python -m conformance.vectors` checks spec/vectors.

Cases are written in the modules of `cases`; what is expected comes from the brute-force oracles in plain Python, never
from the reference. A published vector never changes: `--write` adds new tcIds and refuses anything else.
"""
