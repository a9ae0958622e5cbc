"""The JSON vectors of spec/vectors, and the functions that run the code under test on each vector."""
