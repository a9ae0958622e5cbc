"""Tests of lab/measure."""
