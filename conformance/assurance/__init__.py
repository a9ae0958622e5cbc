"""What watches the suite and the text: layers, trace, mutants, proofs."""
