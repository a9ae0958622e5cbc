"""What watches the suite and the text: layers, trace, saboteurs, mutation, proofs."""
