"""Brute force for what no backend is judged by: injection's items and the statistics of paired runs."""
