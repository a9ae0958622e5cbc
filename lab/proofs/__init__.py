"""Proofs about the source of all integer decisions: `python -m lab.proofs`.

`source.py` reads a function from its file and executes it symbolically, so a lemma is about the code that ships. Then
z3 searches for a counterexample over all integers, and finds none. False claims must be refuted, because a proof that
cannot fail proves nothing. The exit code is 1 on any surprise. z3 and the translator are trusted.

The proofs stop at loops and sorts, so they do not detect an error there. `__main__.NOT_READ` lists these parts, and
each run prints the list. A test plants an error in each part, and the published vectors detect it. The model in Coq has
theorems about these parts.
"""
