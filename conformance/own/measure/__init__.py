"""Tests of conformance/measure."""
