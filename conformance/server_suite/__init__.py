"""Tests that a running server evicts, and that its evictions are those that it states (spec/witness.md)."""
