"""Session that applies a policy to a model, and the functions observe, decide, compact and read."""
