"""Tests of the fast backends that do not apply to other backends."""
