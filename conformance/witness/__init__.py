"""The statement of spec/witness.md, and a client of servers that give statements."""
