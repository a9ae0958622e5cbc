"""Tests of our own packages."""
