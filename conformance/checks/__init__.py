"""What the tests of several files ask of a result."""
