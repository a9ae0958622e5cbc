"""Observation of the model's attention, and attention masks by position."""
