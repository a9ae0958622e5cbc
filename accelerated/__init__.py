"""Fast backends. Files and functions are named as in `reference`. No module of a backend imports `reference`."""
