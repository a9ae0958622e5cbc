"""Tests of the fast backends that say nothing about another backend."""
