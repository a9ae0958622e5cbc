"""Backend `triton` for CUDA, or Triton's interpreter. S1 uses float32; S2 to S6 are the host's."""
