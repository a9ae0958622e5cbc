"""A cache that forgets: tensors and positions of the kept tokens, in memory and in files."""
