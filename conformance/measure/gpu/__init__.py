"""One command for a machine with a GPU: `python -m conformance.measure.gpu`, or `nox -s lab -- gpu`.

It proves the kernels compiled on the device, and only then measures them; the figures go to docs/results. It needs
numpy, torch, triton, numba, threadpoolctl, hypothesis, pytest, jaxtyping and transformers. `--dry-run` walks the same
path on a CPU.
"""
