"""Backend `triton` for CUDA devices and for Triton's interpreter. S1 uses float32. S2 to S6 run on the host."""
