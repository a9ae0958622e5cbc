"""Statements of spec/witness.md, and a client of servers that send statements."""
