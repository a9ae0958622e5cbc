"""Tests of the specification's records, doors and pages."""
