"""Many tasks, depths and budgets, with intervals."""
