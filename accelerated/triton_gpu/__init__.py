"""Backend `triton` for CUDA devices and for Triton's interpreter. S1 uses float32, and S2 to S6 use float64."""
