"""Backend `torch`: stages and scores in plain PyTorch, on any of its devices."""
