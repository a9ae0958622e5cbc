"""Measurement of policies and budgets on the same observed prompts: kept evidence, likelihood and answers."""
