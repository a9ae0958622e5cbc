"""Policies x budgets x tasks on one model: cells, controls, results, a table and a picture."""
