"""Mutation: small changes to the reference and to Numba's code, each of which a test of its item must notice.

`python -m conformance.assurance.mutation run` tries a seeded sample and goes on where it stopped; `... report` counts
the killed and fails on a survivor that survivors.toml does not explain. What is not mutated, and why, is in `operators`
and `mutants`.
"""
