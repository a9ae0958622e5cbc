"""Proofs over the source of every integer-only decision: `python -m conformance.assurance.proofs`, 1 on any surprise.

A function's text is read from its file and executed symbolically (`source.py`), so a lemma speaks of the code that
ships; then z3 looks for a counterexample, over all integers, and finds none. Beside the lemmas stand false claims,
which must be refuted: a proof that cannot fail proves nothing. What is trusted: z3, the translator, and the loops
around the steps that are proved (Hypothesis sees to these).
"""
