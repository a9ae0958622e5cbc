"""How fast the stages are, as ratios inside one run: `nox -s lab -- bench`. Not collected with the suite."""
