"""Writes the JSON vectors of spec/vectors, and checks them: `python -m conformance.assurance.vector_writer`.

Cases are written in the modules of `cases`; what is expected comes from the brute-force oracles in plain Python, never
from the reference. A published vector never changes: `--write` adds new tcIds and refuses anything else.
"""
