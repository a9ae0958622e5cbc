"""Separate program that computes which tokens policies keep on a Llama model.

All modules except `__main__` import NumPy only.
"""
