"""Checks of the suite and the text: layers, trace, mutants and proofs."""
