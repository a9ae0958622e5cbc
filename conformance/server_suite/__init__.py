"""Tests of a running server: did the server evict, and as it states (spec/witness.md)?"""
