"""Benchmarks, GPU runs and comparisons with other libraries."""
