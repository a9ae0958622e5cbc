"""How fast the stages are, as ratios inside one run: `nox -s bench`. Not collected with the suite."""
