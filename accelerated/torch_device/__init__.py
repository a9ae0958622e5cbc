"""Backend `torch`: stages and scores in plain PyTorch, on any device that PyTorch supports except MPS."""
