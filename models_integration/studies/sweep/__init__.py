"""CrystalCache with one parameter varied at a time: sensitivity, and what extensions buy."""
