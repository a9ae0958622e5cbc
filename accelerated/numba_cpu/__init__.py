"""Numba on the CPU. S1 is float32; S2 to S6 are float64 and sum in the specification's order."""
