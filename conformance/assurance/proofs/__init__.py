"""Proofs over the source of every integer-only decision: `python -m conformance.assurance.proofs`, 1 on any surprise.

A function's text is read from its file and executed symbolically (`source.py`), so a lemma speaks of the code that
ships; then z3 looks for a counterexample, over all integers, and finds none. Beside the lemmas stand false claims,
which must be refuted: a proof that cannot fail proves nothing. What is trusted: z3 and the translator.

The proofs stop at loops and sorts: an error there goes unnoticed here. `__main__.NOT_READ` lists these parts, each run
prints them, and a test plants an error in each, which published vectors find. The model in Coq has theorems about them.
"""
