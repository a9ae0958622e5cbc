"""Properties of a model that policies need: layers, weights, RoPE, sentence ends, and open contexts."""
