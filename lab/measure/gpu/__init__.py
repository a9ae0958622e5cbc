"""Checks and measurements on a GPU: `python -m lab.measure.gpu`, or `nox -s lab -- gpu`.

The command first tests the compiled kernels on the device, and then measures them. It writes the figures to
docs/results. It needs numpy, torch, triton, numba, threadpoolctl, hypothesis, pytest, jaxtyping and transformers.
`--dry-run` runs the same steps on a CPU.
"""
