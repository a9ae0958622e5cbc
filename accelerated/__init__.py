"""Fast backends: the stages of `reference`, with equal file and function names. No module imports `reference`."""
