"""The evaluations of the papers: protocols as files, and the tables that they fill."""
