"""Triton on CUDA, or in its interpreter. S1 is float32; S2 to S6 are float64 and sum in the stated order."""
