"""Benchmarks of the stages, as ratios inside one run: `nox -s lab -- bench`. The suite does not collect them."""
