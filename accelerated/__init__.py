"""Fast backends, whose files and functions have the same names as in `reference`. No module imports `reference`."""
