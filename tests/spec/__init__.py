"""Tests of the specification's records, public functions and pages."""
