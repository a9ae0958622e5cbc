"""Every causal family of transformers, tiny: a policy holds on it or refuses it by name."""
