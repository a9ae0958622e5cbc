"""Evaluations of the papers: protocols as files, and the tables that are filled from results."""
