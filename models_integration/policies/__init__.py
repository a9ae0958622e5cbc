"""Policies with a budget and a backend, as classes and by name."""
