"""Policies while tokens are decoded and while turns are read, for our own tests and for the saboteurs."""
