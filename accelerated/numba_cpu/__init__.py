"""Backend `numba` for the CPU. S1 uses float32. S2 to S6 use float64, and add numbers in the specified order."""
