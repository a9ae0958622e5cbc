"""Brute force for what no backend is judged by: policies, injection, and the statistics of paired runs."""
