"""What a policy must know of a model: its layers, weights, rotation, sentence ends, and who uses it."""
